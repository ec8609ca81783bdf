// Learning curves and singular values.
function learningCharts(host) {
  const group = [];
  const step = { label: "step", name: whole, format: short };
  const charts = [
    ["Loss", { label: "loss" }, [["loss", "loss", null]], { smooth: true }],
    ["Cost against budget", { label: "cost relative to dense", format: percent, read: tenths, zero: true }, [["relative_cost", "cost", null], ["budget", "budget", "3 4"]]],
    ["Sigma of the masks", { label: "sigma, log scale", log: true, missing: "\u221e" }, [["sigma", "sigma", null]]],
    ["Live blocks", { label: "blocks that still cost something", zero: true, read: whole }, [["live_blocks", "live blocks", null]]],
  ];
  for (const [title, y, lines, more] of charts) {
    const series = data.runs.flatMap((run, r) =>
      lines.filter(([key]) => run.history[key]?.some((value) => value !== null))
        .map(([key, label, dash]) => ({ x: run.history.step, y: run.history[key], ...lineStyle(run, r, label, dash), ...more })));
    if (series.length) lineChart(node(host, "figure", { class: "panel" }), { title, series, x: step, y, group });
  }
  const { metric } = data;
  const series = data.runs.map((run, r) => ({
    x: run.history.value.map((pair) => pair[0]), y: run.history.value.map((pair) => pair[1]),
    ...lineStyle(run, r, metric.name, null), dots: run.history.value.length < 40 }));
  const found = series.filter((each) => each.x.length);
  const read = (value) => (metric.unit === "%" ? `${value.toFixed(2)}\u202f%` : `${short(value)} ${metric.unit}`);
  const y = { label: metric.unit ? `${metric.name} (${metric.unit})` : metric.name, read };
  const title = `${metric.name[0].toUpperCase()}${metric.name.slice(1)}`;
  if (found.length) lineChart(node(host, "figure", { class: "panel" }), { title, series: found, x: step, y, group });
}

// Several runs: colour is the run, and a budget is dotted and without a read-out. One run: the second line of a chart is drawn in grey.
function lineStyle(run, index, label, dash) {
  if (several) return { label: run.label, className: runClass(index), dash: dash ? "1 4" : DASHES[index % 6], quiet: dash !== null };
  return { label, className: dash ? "ink" : runClass(0), dash };
}

function spectrumChart(host, controls) {
  const names = [...new Set(data.runs.flatMap((run) => run.layers.filter((layer) => layer.singular).map((layer) => layer.name)))];
  const label = node(controls, "label", { class: "check" }, "Layer");
  const select = node(label, "select");
  for (const name of names) node(select, "option", { value: name }, name);
  const step = (by) => {
    select.selectedIndex = (select.selectedIndex + by + names.length) % names.length;
    draw();
  };
  const buttons = node(controls, "span", { class: "pair" });
  for (const [text, title, by] of [["\u2190", "Previous layer", -1], ["\u2192", "Next layer", 1]])
    node(buttons, "button", { type: "button", class: "quiet", "aria-label": title }, text).addEventListener("click", () => step(by));
  select.addEventListener("change", draw);

  function draw() {
    host.replaceChildren();
    const found = data.runs.map((run, r) => [run, r, run.layers.find((layer) => layer.name === select.value)]).filter((entry) => entry[2]?.singular);
    const dense = found.find(([, , layer]) => layer.dense?.length)?.[2];
    const series = dense ? [spectrum(dense, dense.dense, "dense", "ink", "3 4")] : [];
    for (const [run, r, layer] of found) {
      const rank = layer.rank === null ? "" : `, rank ${layer.rank}`;
      series.push(spectrum(layer, layer.singular, (several ? run.label : "structured") + rank, runClass(r), several ? DASHES[r % 6] : null));
    }
    const x = { label: "number of the singular value" };
    lineChart(host, { title: select.value, series, x, y: { label: "singular value, log scale", log: true }, height: 320 });
  }
  draw();
}

// Samples lie at even steps from the first singular value to the last; what rounding left of zero is cut off.
function spectrum(layer, values, label, className, dash) {
  const last = Math.min(...layer.shape), top = Math.max(...values);
  const x = values.map((_, i) => (values.length > 1 ? 1 + Math.round((i * (last - 1)) / (values.length - 1)) : 1));
  const y = values.map((value, i) => (value < top * 1e-5 || (layer.rank && className !== "ink" && x[i] > layer.rank) ? null : value));
  return { x, y, label, className, dash };
}
