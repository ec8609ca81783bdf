// Charts of single items (points, bars): the item under the pointer, or chosen by arrow keys, shows its facts.
// draw(width) returns items {x, y, title, facts, element} in order from left to right.
function itemChart(host, draw) {
  let items = [], on = null;
  host.tabIndex = 0;
  host.setAttribute("role", "img");
  host.setAttribute("aria-label", `${host.dataset.label}. Arrow keys read values.`);

  function show(item) {
    on?.element.classList.remove("on");
    on = item;
    if (!item) return hideTip();
    item.element.classList.add("on");
    const box = host.getBoundingClientRect();
    showTip(item.title, item.facts, box.left + item.x, box.top + item.y);
    host.setAttribute("aria-label", [item.title, ...item.facts.map((fact) => fact.join(" "))].join(", "));
  }
  host.addEventListener("pointermove", (event) => {
    const box = host.getBoundingClientRect();
    const far = (item) => Math.hypot(item.x - (event.clientX - box.left), (item.y - (event.clientY - box.top)) * item.weight);
    const best = items.reduce((a, b) => (far(b) < far(a) ? b : a), items[0]);
    show(best && far(best) < 60 ? best : null);
  });
  host.addEventListener("pointerleave", () => show(null));
  host.addEventListener("blur", () => show(null));
  host.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return show(null);
    const next = stepKey(event, on ? items.indexOf(on) : -1, items.length, 1);
    if (next !== null) show(items[next]);
  });
  onWidth(host, (width) => {
    items = draw(width);
    on = null;
  });
}

// Accuracy against cost. One run: a colour and a shape for each model. Several: colour is the run, shape the model.
function tradeoffChart(host) {
  const points = data.runs.flatMap((run, r) =>
    run.results.filter((result) => result.cost !== null).map((result) => ({ ...result, run: r, runLabel: run.label })));
  const names = [...new Set(points.map((point) => point.name))].sort((a, b) => rankOf(points, a) - rankOf(points, b));
  const colours = names.filter((name) => !points.find((point) => point.name === name).dense);
  const className = (point) => (point.dense ? "ink" : runClass(several ? point.run : colours.indexOf(point.name)));
  const shape = (point) => (point.dense ? 3 : [0, 1, 2, 4, 5][colours.indexOf(point.name) % 5]);
  if (several) shapeLegend(host, names, points, shape);

  itemChart(host, (width) => {
    const { metric } = data;
    const better = metric.higher ? "" : ", lower is better";
    const unit = metric.unit ? `${metric.unit}${better}` : better.slice(2);
    const x = { values: points.map((point) => point.cost), zero: true, label: "cost relative to dense", format: percent, inset: 8 };
    const values = points.map((point) => point.value), room = 0.06 * (Math.max(...values) - Math.min(...values));
    const y = { values: values.flatMap((value) => [value - room, value + room]), label: unit ? `${metric.name} (${unit})` : metric.name };
    const drawn = frame(host, width, clamp(width * 0.42, 260, 380), x, y);
    const dense = new Set(points.filter((point) => point.dense).map((point) => drawn.y.at(point.value)));
    for (const y of dense) node(drawn.svg, "line", { x1: drawn.left, x2: drawn.right, y1: y, y2: y, class: "cursor" });
    if (several) for (const name of colours) joinPoints(drawn, points.filter((point) => point.name === name));
    const items = points.map((point) => {
      const [px, py] = [drawn.x.at(point.cost), drawn.y.at(point.value)];
      const element = mark(drawn.svg, px, py, shape(point), point.main ? 8 : 6, `${point.main || point.dense ? "mark" : "hollow"} ${className(point)}`);
      const title = several ? `${point.name} \u00b7 ${point.runLabel}` : point.name;
      return { x: px, y: py, weight: 1, title, facts: point.facts, element, name: point.name };
    });
    if (!several) labelItems(drawn, items);
    return items.sort((a, b) => a.x - b.x);
  });
}

function rankOf(points, name) {
  const found = points.filter((point) => point.name === name);
  return found.some((point) => point.main) ? 0 : found.some((point) => point.dense) ? 2 : 1;
}

function joinPoints(drawn, points) {
  const sorted = [...points].sort((a, b) => a.cost - b.cost).map((p) => [drawn.x.at(p.cost), drawn.y.at(p.value)]);
  if (sorted.length > 1) drawLine(drawn.svg, sorted, "join", null);
}

function shapeLegend(host, names, points, shape) {
  const legend = runLegend(host);
  for (const name of names) {
    const entry = node(legend, "span");
    const point = points.find((each) => each.name === name);
    const svg = node(entry, "svg", { width: 16, height: 16, class: "grey", "aria-hidden": "true" });
    const style = point.main || point.dense ? "fill:var(--c)" : "fill:none;stroke:var(--c);stroke-width:2";
    mark(svg, 8, 8, shape(point), 5, null).setAttribute("style", style);
    entry.append(name);
  }
}

// A name beside each mark, at the first of four places that is free.
function labelItems(drawn, items) {
  const taken = items.map((item) => [item.x - 9, item.y - 9, 18, 18]);
  for (const item of items) {
    const w = item.name.length * 6.6, h = 15;
    const places = [[item.x + 13, item.y - 8], [item.x - 13 - w, item.y - 8], [item.x - w / 2, item.y - 27], [item.x - w / 2, item.y + 12],
      [item.x + 11, item.y - 22], [item.x + 11, item.y + 8]];
    const free = places.find(([x, y]) => x > drawn.left && x + w < drawn.right + 8 && y > 14 && y + h < drawn.bottom &&
      !taken.some(([tx, ty, tw, th]) => x < tx + tw && tx < x + w && y < ty + th && ty < y + h));
    if (!free) continue;
    taken.push([...free, w, h]);
    node(drawn.svg, "text", { x: free[0], y: free[1] + 12, class: "name" }, item.name);
  }
}
