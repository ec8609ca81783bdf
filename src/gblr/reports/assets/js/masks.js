// Mask pictures (paper Fig. 6): how many blocks overlap at each entry, drawn when they come into view.
// Pale to dark blue on a light page, dark to pale on a dark one: lightness alone tells few from many.
const rgb = (hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
const ON_LIGHT = ["d9edb8", "aedcb6", "7acabc", "41b6c4", "1d91c0", "225ea8", "253494", "081d58"].map(rgb);
const ON_DARK = ["2a4a73", "236597", "2685b8", "3ba7c6", "6cc5c0", "a3dbba", "d2edc0", "f4fad6"].map(rgb);
let forPrint = false;

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return !forPrint && (theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
}

// row_start, row_width, col_start, col_width of each live block, widest first.
function blocksOf(layer) {
  if (!layer.decoded) {
    const bytes = atob(layer.blocks);
    const number = (i) => bytes.charCodeAt(2 * i) + 256 * bytes.charCodeAt(2 * i + 1);
    const blocks = Array.from({ length: bytes.length / 8 }, (_, k) => [0, 1, 2, 3].map((j) => number(4 * k + j)));
    layer.decoded = blocks.sort((a, b) => b[1] + b[3] - a[1] - a[3]);
  }
  return layer.decoded;
}

// Where a cyclic run of `width` from `start` lies on an axis: one piece, or two where it wraps around.
function pieces(start, width, length) {
  const end = start + width;
  return end <= length ? [[start, end]] : [[start, length], [0, end - length]];
}

// Steps of a run's coverage over `pixels` pixels, as [pixel, change]; an edge inside a pixel is shared with the next one.
function steps(start, width, length, pixels) {
  const found = [];
  for (const piece of pieces(start, width, length))
    piece.forEach((edge, i) => {
      const at = (edge * pixels) / length, pixel = Math.floor(at), sign = i ? -1 : 1;
      found.push([pixel, sign * (1 - (at - pixel))], [pixel + 1, sign * (at - pixel)]);
    });
  return found;
}

// Mean number of blocks in each pixel: corners of all blocks first, then running sums along both axes.
function raster(blocks, [rows, cols], height, width) {
  const stride = width + 2, sums = new Float32Array((height + 2) * stride);
  for (const [rowStart, rowWidth, colStart, colWidth] of blocks) {
    const across = steps(colStart, colWidth, cols, width);
    for (const [y, down] of steps(rowStart, rowWidth, rows, height)) for (const [x, change] of across) sums[y * stride + x] += down * change;
  }
  for (let y = 0; y < height; y++) for (let x = 1; x < width; x++) sums[y * stride + x] += sums[y * stride + x - 1];
  for (let y = 1; y < height; y++) for (let x = 0; x < width; x++) sums[y * stride + x] += sums[(y - 1) * stride + x];
  return (x, y) => sums[y * stride + x];
}

// [red, green, blue] for a share of the scale, between 0 and 1.
function colour(share, dark) {
  const stops = dark ? ON_DARK : ON_LIGHT;
  const at = clamp(share, 0, 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
  return stops[i].map((value, c) => value + (at - i) * (stops[i + 1][c] - value));
}

function blankColour(canvas) {
  return getComputedStyle(canvas).backgroundColor.match(/[\d.]+/g).slice(0, 3).map(Number);
}

// Fits a canvas into a square of `side` CSS pixels (very long matrices keep a tenth of it) and paints it.
function paintMask(canvas, layer, side, top) {
  const longest = Math.max(...layer.shape);
  const [h, w] = layer.shape.map((size) => Math.max(1, Math.round(side * Math.max(size / longest, 0.1))));
  const ratio = forPrint ? 2 : window.devicePixelRatio || 1;
  canvas.width = Math.round(w * ratio);
  canvas.height = Math.round(h * ratio);
  canvas.style.width = `${w}px`;
  canvas.style.height = `${h}px`;
  const value = raster(blocksOf(layer), layer.shape, canvas.height, canvas.width);
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  const blank = blankColour(canvas), dark = isDark();
  const table = Array.from({ length: 513 }, (_, i) => colour(i / 512, dark));
  for (let y = 0, p = 0; y < canvas.height; y++)
    for (let x = 0; x < canvas.width; x++, p += 4) {
      const count = value(x, y), some = clamp(count, 0, 1); // less than one block on average: fades into blank
      const [r, g, b] = table[Math.round(clamp((count - 1) / Math.max(top - 1, 1), 0, 1) * 512)];
      image.data[p] = blank[0] + some * (r - blank[0]);
      image.data[p + 1] = blank[1] + some * (g - blank[1]);
      image.data[p + 2] = blank[2] + some * (b - blank[2]);
      image.data[p + 3] = 255;
    }
  context.putImageData(image, 0, 0);
  return image;
}

const masks = { run: 0, type: "all", same: false, tiles: [] };

function maskSection(controls, grid) {
  const counts = data.runs.map((run) => run.layers.filter((layer) => layer.blocks));
  masks.run = Math.max(0, counts.findIndex((layers) => layers.length));
  const types = [...new Set(counts.flat().map((layer) => layer.type))];
  const redo = (key) => (value) => {
    masks[key] = value;
    fillMasks(grid);
  };
  if (several) choice(controls, "Run", "mask-run", data.runs.map((run, i) => [i, run.label, runClass(i)]).filter(([i]) => counts[i].length), redo("run"));
  if (types.length > 1) choice(controls, "Type", "mask-type", ["all", ...types].map((type) => [type, type]), redo("type"));
  const label = node(controls, "label", { class: "check" });
  const same = node(label, "input", { type: "checkbox" });
  label.append("One colour scale for all layers");
  same.addEventListener("change", () => redo("same")(same.checked));
  const scale = node(controls, "span", { class: "scale" });
  scale.append("1");
  masks.scale = node(scale, "canvas", { width: 120, height: 1, "aria-hidden": "true" });
  masks.most = node(scale, "span");
  masks.watch = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => drawTile(entry.target)), { rootMargin: "300px" });
  fillMasks(grid);
}

function fillMasks(grid) {
  masks.watch.disconnect();
  grid.replaceChildren();
  masks.layers = data.runs[masks.run].layers.filter((layer) => layer.blocks && (masks.type === "all" || layer.type === masks.type));
  masks.top = Math.max(1, ...data.runs.flatMap((run) => run.layers.map((layer) => layer.most ?? 0)));
  masks.tiles = masks.layers.map((layer, i) => {
    const tile = node(grid, "button", { type: "button", class: "tile", "aria-haspopup": "dialog" });
    node(node(tile, "span", { class: "stage" }), "canvas", { width: 1, height: 1, role: "img", "aria-label": `Blocks of ${layer.name}` });
    dotted(node(tile, "b"), layer.name);
    const rank = layer.rank === null ? "" : `rank ${layer.rank} \u00b7 `;
    node(tile, "small", {}, `${rank}${layer.cost === null ? "" : tenths(layer.cost)}`);
    node(tile, "small", {}, `up to ${layer.most} blocks`);
    tile.layer = layer;
    tile.addEventListener("click", () => openMask(i));
    masks.watch.observe(tile);
    return tile;
  });
  drawScale();
}

const topOf = (layer) => (masks.same ? masks.top : layer.most);

function drawTile(tile) {
  masks.watch.unobserve(tile);
  const stage = tile.firstChild;
  paintMask(stage.firstChild, tile.layer, Math.max(40, stage.clientWidth), topOf(tile.layer));
  tile.dataset.drawn = "true";
}

// After a change of theme, width or medium: what was drawn is drawn again, all of it for print.
function redrawMasks(all = false) {
  for (const tile of masks.tiles) if (all || tile.dataset.drawn) drawTile(tile);
  if (masks.scale) drawScale();
}

function drawScale() {
  paintScale(masks.scale);
  masks.most.textContent = masks.same ? `${masks.top} blocks` : "the most of the layer";
}

function paintScale(canvas) {
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    context.fillStyle = `rgb(${colour(x / (canvas.width - 1), isDark()).map(Math.round).join(" ")})`;
    context.fillRect(x, 0, 1, 1);
  }
}
