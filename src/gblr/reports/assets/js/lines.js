// Line charts with a legend that reads values at the cursor. Charts of one group share the cursor.
const DASHES = [null, "7 4", "2 4", "10 3 2 3", "4 2", "1 3"];

// chart: {title, series: [{label, x, y, className, dash, smooth, dots}], x, y: axes without values, group}
function lineChart(host, chart) {
  const head = node(host, "header");
  node(head, "h3", {}, chart.title);
  const place = node(head, "output");
  const legend = chart.series.length > 1 ? node(host, "div", { class: "legend" }) : null;
  const area = node(host, "div", { class: "chart", tabindex: "0", role: "img", "aria-label": describe(chart) });
  const values = chart.series.map((series) => (legend && !series.quiet ? legendEntry(legend, series) : null));
  let drawn = null, at = null;

  function draw(width) {
    const xAxis = { ...chart.x, values: chart.series.flatMap((s) => s.x) };
    const yAxis = { ...chart.y, values: chart.series.flatMap((s) => s.y) };
    drawn = frame(area, width, chart.height ?? 230, xAxis, yAxis);
    for (const series of chart.series) drawSeries(drawn, series);
    drawn.cursor = node(drawn.svg, "g");
    show(at);
  }
  function show(position) {
    at = position;
    if (!drawn) return;
    drawn.cursor.replaceChildren();
    place.textContent = position === null ? "" : `${chart.x.label} ${chart.x.name?.(position) ?? whole(position)}`;
    if (position !== null) {
      const x = clamp(drawn.x.at(position), drawn.left, drawn.right);
      node(drawn.cursor, "line", { x1: x, x2: x, y1: drawn.top, y2: drawn.bottom, class: "cursor" });
    }
    chart.series.forEach((series, i) => {
      const found = position === null ? -1 : nearest(series.x, position);
      const text = found < 0 ? "" : readout(series, found, chart.y);
      if (values[i]) values[i].textContent = text;
      else if (!legend && text) place.append("\u2002"), node(place, "b", {}, text);
      if (found >= 0 && series.y[found] !== null)
        mark(drawn.cursor, drawn.x.at(series.x[found]), drawn.y.at(series.y[found]), 0, 4, `mark ${series.className}`);
    });
  }
  const all = chart.series.flatMap((series) => series.x);
  const move = (position) => (chart.group ?? [show]).forEach((each) => each(position));
  chart.group?.push(show);
  area.addEventListener("pointermove", (event) => {
    if (!drawn || !all.length) return;
    const box = area.getBoundingClientRect();
    const share = (event.clientX - box.left - drawn.left) / (drawn.right - drawn.left);
    const target = drawn.x.low + clamp(share, 0, 1) * (drawn.x.high - drawn.x.low);
    move(all[nearest(all, target)]);
  });
  area.addEventListener("pointerleave", () => move(null));
  area.addEventListener("blur", () => move(null));
  area.addEventListener("keydown", (event) => {
    const longest = chart.series.reduce((best, s) => (s.x.length > best.length ? s.x : best), []);
    const next = stepKey(event, at === null ? -1 : nearest(longest, at), longest.length, Math.ceil(longest.length / 60));
    if (next !== null) move(longest[next]);
  });
  onWidth(area, draw);
}

// The index that an arrow key, Home or End leads to; null for other keys.
function stepKey(event, index, length, stride) {
  const moves = { ArrowRight: index + stride, ArrowLeft: index < 0 ? length - 1 : index - stride, Home: 0, End: length - 1 };
  if (!(event.key in moves) || !length) return null;
  event.preventDefault();
  return clamp(moves[event.key], 0, length - 1);
}

function describe(chart) {
  const ends = chart.series.filter((series) => !series.quiet).map((series) => {
    const numbers = finite(series.y);
    return numbers.length ? `${series.label} from ${short(numbers[0])} to ${short(numbers.at(-1))}` : series.label;
  });
  return `${chart.title}: ${ends.join("; ")}. Arrow keys read values.`;
}

function legendEntry(legend, series) {
  const entry = node(legend, "span");
  const key = node(entry, "svg", { width: 20, height: 8, "aria-hidden": "true", class: series.className });
  const style = "stroke:var(--c);stroke-width:2";
  node(key, "line", { x1: 0, x2: 20, y1: 4, y2: 4, style, "stroke-dasharray": series.dash });
  entry.append(series.label);
  return node(entry, "b");
}

function readout(series, index, axis) {
  const value = series.y[index];
  const shown = value === null ? axis.missing ?? "\u2013" : (axis.read ?? axis.format ?? short)(value);
  return series.mean ? `${shown} (mean ${short(series.mean[index])})` : shown;
}

function drawSeries(drawn, series) {
  const points = series.y.map((value, i) => (value === null ? null : [drawn.x.at(series.x[i]), drawn.y.at(value)]));
  const noisy = series.smooth && points.length > 120;
  drawLine(drawn.svg, points, `line ${noisy ? "raw " : ""}${series.className}`, series.dash);
  if (noisy) {
    series.mean = runningMean(series.y, Math.round(points.length / 40));
    const smooth = series.mean.map((value, i) => (value === null ? null : [drawn.x.at(series.x[i]), drawn.y.at(value)]));
    drawLine(drawn.svg, smooth, `line ${series.className}`, series.dash);
  }
  if (series.dots || points.length === 1)
    for (const point of points) if (point) mark(drawn.svg, ...point, 0, 3.5, `mark ${series.className}`);
}

function drawLine(svg, points, className, dash) {
  let path = "", pen = "M";
  for (const point of points) {
    if (point) path += `${pen}${point[0].toFixed(1)},${point[1].toFixed(1)}`;
    pen = point ? "L" : "M";
  }
  if (path) node(svg, "path", { d: path, class: className, "stroke-dasharray": dash });
}

function runningMean(values, reach) {
  return values.map((_, i) => {
    const near = finite(values.slice(Math.max(0, i - reach), i + reach + 1));
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}

function nearest(values, target) {
  let best = -1;
  values.forEach((value, i) => {
    if (best < 0 || Math.abs(value - target) < Math.abs(values[best] - target)) best = i;
  });
  return best;
}
