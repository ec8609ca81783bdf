// Puts the page together: theme, copy buttons, tables that sort, print, and the charts that have a place.
function setUpTheme() {
  const button = byId("theme"), root = document.documentElement, query = matchMedia("(prefers-color-scheme: dark)");
  const name = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    redrawMasks();
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  query.addEventListener("change", name);
  name();
}

function setUpCopy() {
  for (const button of document.querySelectorAll("[data-copy]"))
    button.addEventListener("click", async () => {
      button.textContent = (await copyText(button)) ? "Copied" : "Press Ctrl+C";
      setTimeout(() => (button.textContent = "Copy"), 1800);
    });
}

// A page opened as a file may have no clipboard: then the text is at least selected.
async function copyText(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    return true;
  } catch {
    getSelection().selectAllChildren(button.parentNode.querySelector("code"));
    return document.execCommand("copy");
  }
}

function setUpSorting() {
  for (const table of document.querySelectorAll("table.sortable"))
    table.querySelectorAll("thead th").forEach((head, column) => head.firstChild.addEventListener("click", () => sortTable(table, head, column)));
}

function sortTable(table, head, column) {
  const up = head.getAttribute("aria-sort") === "descending" || (head.getAttribute("aria-sort") === null && !head.classList.contains("num"));
  for (const each of table.querySelectorAll("thead th")) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = (row) => row.cells[column].dataset.key ?? null;
  const compare = (a, b) => {
    if (key(a) !== null && key(b) !== null) return key(a) - key(b);
    return a.cells[column].textContent.localeCompare(b.cells[column].textContent, "en", { numeric: true });
  };
  const rows = [...table.tBodies[0].rows].sort((a, b) => (up ? compare(a, b) : compare(b, a)));
  table.tBodies[0].append(...rows);
}

// On paper everything is drawn, in light colours.
const PAPER = 690; // CSS pixels between the margins of A4
function setUpPrint() {
  const change = (printing) => {
    forPrint = printing;
    redrawMasks(printing);
    redrawCharts(printing ? Math.min(1, PAPER / byId("content").clientWidth) : 1);
  };
  window.addEventListener("beforeprint", () => change(true));
  window.addEventListener("afterprint", () => change(false));
  matchMedia("print").addEventListener("change", (event) => change(event.matches));
}

function setUpNav() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) links.get(entry.target.id)?.classList.toggle("here", entry.isIntersecting);
  }, { rootMargin: "-30% 0px -65% 0px" });
  for (const section of document.querySelectorAll("main > section")) watch.observe(section);
}

const places = [
  ["tradeoff-chart", tradeoffChart],
  ["curves", learningCharts],
  ["layer-chart", layerChart],
  ["mask-grid", (grid) => maskSection(byId("mask-controls"), grid)],
  ["spectrum-chart", (host) => spectrumChart(host, byId("spectrum-controls"))],
];
for (const [id, build] of places) if (byId(id)) build(byId(id));
setUpTheme();
setUpCopy();
setUpSorting();
setUpPrint();
setUpNav();
