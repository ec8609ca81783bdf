// Helpers for all scripts. Text enters the page as text nodes only: no string ever becomes markup.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const several = data.runs.length > 1;
const byId = (id) => document.getElementById(id);

function node(parent, name, attributes = {}, text = null) {
  const inSvg = name === "svg" || parent?.namespaceURI === SVG;
  const made = inSvg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  parent?.append(made);
  return made;
}

const runClass = (index) => `run${index % 6}`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const finite = (values) => values.filter((value) => value !== null && Number.isFinite(value));

// Three digits: 0.0123, 98.8, 1234, 12.3k, 85.8M
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return plain(value / 1e6) + "M";
  if (size >= 1e4) return plain(value / 1e3) + "k";
  return size > 0 && size < 1e-5 ? value.toExponential(1).replace("-", "\u2212") : plain(value);
}
function plain(value) {
  return String(Number(value.toPrecision(value >= 1000 ? 4 : 3))).replace("-", "\u2212");
}
const percent = (value) => `${plain(value * 100)}\u202f%`;
const tenths = (value) => `${(value * 100).toFixed(value !== 0 && value < 0.01 ? 2 : 1)}\u202f%`;
const whole = (value) => Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");

// A dotted name as text that may break behind its dots.
function dotted(parent, name) {
  name.split(".").forEach((part, i) => {
    if (i) parent.append(".", document.createElement("wbr"));
    parent.append(part);
  });
}

// One floating read-out for all charts; facts are [name, value] pairs.
function showTip(title, facts, x, y) {
  const tip = byId("tip");
  tip.replaceChildren();
  node(tip, "b", {}, title);
  factList(tip, facts);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${clamp(x + 16, 8, innerWidth - box.width - 8)}px`;
  tip.style.top = `${y + 16 + box.height > innerHeight - 8 ? Math.max(8, y - 16 - box.height) : y + 16}px`;
}
function hideTip() {
  byId("tip").hidden = true;
}
function factList(parent, facts, className = null) {
  const list = node(parent, "dl", { class: className });
  for (const [name, value] of facts) {
    node(list, "dt", {}, name);
    node(list, "dd", {}, value);
  }
  return list;
}

// Calls draw(width) now and whenever the width of the host changes; for paper at a share of it, so that text keeps its size.
const drawn = new Map();
function onWidth(host, draw) {
  let last = 0;
  drawn.set(host, draw);
  new ResizeObserver(() => {
    const width = Math.floor(host.clientWidth);
    if (width > 0 && width !== last) draw((last = width));
  }).observe(host);
}
function redrawCharts(share) {
  for (const [host, draw] of drawn)
    if (host.isConnected) draw(Math.max(240, Math.floor(host.clientWidth * share)));
    else drawn.delete(host);
}

// Colours of the runs, above a chart.
function runLegend(host) {
  const legend = node(null, "div", { class: "legend" });
  host.before(legend);
  data.runs.forEach((run, i) => {
    const entry = node(legend, "span");
    node(entry, "i", { class: `swatch ${runClass(i)}` });
    entry.append(run.label);
  });
  return legend;
}

// A row of radio buttons that looks like one control; choose(value) is called on change.
function choice(parent, title, name, options, choose) {
  const group = node(parent, "fieldset", { class: "choice" });
  node(group, "legend", {}, title);
  options.forEach(([value, text, className], i) => {
    const label = node(group, "label");
    const input = node(label, "input", { type: "radio", name, value });
    input.checked = i === 0;
    input.addEventListener("change", () => choose(value));
    if (className) node(label, "i", { class: `swatch ${className}` }, "");
    label.append(className ? `\u2002${text}` : text);
  });
}
