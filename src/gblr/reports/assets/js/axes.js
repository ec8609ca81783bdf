// Scales, ticks and the frame of a chart.
function niceStep(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

function ticksBy(step, low, high) {
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high, wanted) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const stride = Math.max(1, Math.ceil((last - first) / wanted));
  const powers = Array.from({ length: last - first + 1 }, (_, i) => first + i).filter((_, i) => i % stride === 0);
  const inside = (tick) => tick >= low * 0.999 && tick <= high * 1.001;
  const choices = [[1, 2, 5], [1, 3], [1]].map((factors) => powers.flatMap((p) => factors.map((factor) => factor * 10 ** p)).filter(inside));
  return choices.find((ticks) => ticks.length <= wanted + 2) ?? choices[2];
}

// axis: {values, log, zero (begin at 0), label, format, ticks}
function makeScale(axis, from, to, wanted) {
  let values = finite(axis.values);
  if (axis.log) values = values.filter((value) => value > 0);
  let low = values.length ? Math.min(...values) : 0, high = values.length ? Math.max(...values) : 1;
  if (axis.zero) low = Math.min(0, low);
  if (low === high) [low, high] = axis.log ? [low / 2, high * 2] : [low - (axis.zero ? 0 : Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
  const step = axis.log ? null : niceStep(low, high, wanted);
  if (axis.round && step) [low, high] = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  const ticks = axis.log ? logTicks(low, high, wanted) : ticksBy(step, low, high);
  const map = axis.log ? Math.log10 : (value) => value;
  const span = map(high) - map(low);
  const at = (value) => from + ((map(Math.max(value, axis.log ? low : -Infinity)) - map(low)) / span) * (to - from);
  return { at, low, high, ticks };
}

// An SVG with axes; returns {svg, x, y, left, right, top, bottom}, x and y being scales.
function frame(host, width, height, xAxis, yAxis) {
  host.replaceChildren();
  const svg = node(host, "svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const top = 26, bottom = height - (xAxis.label ? 42 : 26);
  const y = makeScale({ round: true, ...yAxis }, bottom, top, Math.max(2, Math.round((bottom - top) / 40)));
  const names = y.ticks.map(yAxis.format ?? short);
  const left = Math.max(...names.map((name) => name.length), 2) * 7 + 12, right = width - 10;
  const x = makeScale(xAxis, left + (xAxis.inset ?? 0), right - (xAxis.inset ?? 0), Math.max(2, Math.round((right - left) / 90)));
  y.ticks.forEach((tick, i) => {
    node(svg, "line", { x1: left, x2: right, y1: y.at(tick), y2: y.at(tick), class: i ? "grid" : "axis" });
    node(svg, "text", { x: left - 8, y: y.at(tick) + 4, "text-anchor": "end" }, names[i]);
  });
  if (!xAxis.bare) {
    node(svg, "line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" });
    for (const tick of x.ticks) {
      node(svg, "line", { x1: x.at(tick), x2: x.at(tick), y1: bottom, y2: bottom + 4, class: "axis" });
      node(svg, "text", { x: x.at(tick), y: bottom + 18, "text-anchor": "middle" }, (xAxis.format ?? short)(tick));
    }
  }
  node(svg, "text", { x: 0, y: 12 }, yAxis.label);
  if (xAxis.label) node(svg, "text", { x: right, y: height - 4, "text-anchor": "end" }, xAxis.label);
  return { svg, x, y, left, right, top, bottom };
}

// Marks: circle, square, triangle, diamond, triangle down, cross; told apart without colour.
const SHAPES = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  (r) => `M${-r * 0.9},${-r * 0.9}h${r * 1.8}v${r * 1.8}h${-r * 1.8}Z`,
  (r) => `M0,${-r * 1.15}L${r * 1.1},${r * 0.85}H${-r * 1.1}Z`,
  (r) => `M0,${-r * 1.3}L${r * 1.3},0L0,${r * 1.3}L${-r * 1.3},0Z`,
  (r) => `M0,${r * 1.15}L${r * 1.1},${-r * 0.85}H${-r * 1.1}Z`,
  (r) => `M${-r},${-r * 0.4}H${-r * 0.4}V${-r}H${r * 0.4}V${-r * 0.4}H${r}V${r * 0.4}H${r * 0.4}V${r}H${-r * 0.4}V${r * 0.4}H${-r}Z`,
];
function mark(svg, x, y, shape, radius, className) {
  return node(svg, "path", { d: SHAPES[shape % SHAPES.length](radius), transform: `translate(${x} ${y})`, class: className });
}
