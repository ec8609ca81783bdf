// Cost by layer: bars in groups by type for one run, dots for several.
function layerChart(host) {
  const layers = new Map();
  data.runs.forEach((run, r) => run.layers.filter((layer) => layer.cost !== null).forEach((layer) => {
    if (!layers.has(layer.name)) layers.set(layer.name, { type: layer.type, name: layer.name, costs: [] });
    layers.get(layer.name).costs.push({ run: r, label: run.label, ...layer });
  }));
  const groups = new Map();
  for (const layer of layers.values()) groups.set(layer.type, [...(groups.get(layer.type) ?? []), layer]);
  const all = [...layers.values()].flatMap((layer) => layer.costs);
  if (several) runLegend(host);

  itemChart(host, (width) => {
    const x = { values: [0, 1], bare: true };
    const y = { values: all.map((entry) => entry.cost), zero: true, format: percent, label: "cost relative to dense" };
    const drawn = frame(host, width, clamp(width * 0.32, 220, 320), x, y);
    const gap = Math.min(24, width * 0.02);
    const slot = Math.min(48, (drawn.right - drawn.left - gap * groups.size) / layers.size);
    const items = [];
    let at = drawn.left + gap / 2, labelEnd = 0;
    for (const [type, members] of groups) {
      const span = slot * members.length;
      members.forEach((layer, i) => layer.costs.forEach((entry) => items.push(drawLayer(drawn, entry, at + slot * (i + 0.5), slot))));
      const costs = members.flatMap((layer) => layer.costs.map((entry) => entry.cost));
      const mean = drawn.y.at(costs.reduce((a, b) => a + b, 0) / costs.length);
      if (!several && members.length > 1) node(drawn.svg, "line", { x1: at - 2, x2: at + span + 2, y1: mean, y2: mean, class: "mean" });
      const middle = at + span / 2, half = type.length * 3.6;
      if (middle - half > labelEnd) {
        node(drawn.svg, "text", { x: middle, y: drawn.bottom + 18, "text-anchor": "middle", class: "name" }, type);
        labelEnd = middle + half + 6;
      }
      at += span + gap;
    }
    return items;
  });
}

function drawLayer(drawn, entry, x, slot) {
  const y = drawn.y.at(entry.cost);
  const facts = several ? [["run", entry.label], ...entry.facts] : entry.facts;
  const size = Math.max(1, slot * 0.78);
  const element = several
    ? mark(drawn.svg, x, y, 0, clamp(slot * 0.4, 2.5, 5), `mark ${runClass(entry.run)}`)
    : node(drawn.svg, "rect", { x: x - size / 2, width: size, y, height: Math.max(1, drawn.bottom - y), rx: Math.min(2, size / 3), class: `bar-item ${runClass(0)}` });
  return { x, y, weight: several ? 0.5 : 0.05, title: entry.name, facts, element };
}
