// One mask enlarged: its facts, the count under the pointer, and its blocks one by one.
const view = { index: 0, block: 0 };

function openMask(index) {
  const dialog = byId("mask-dialog");
  if (!view.built) buildDialog(dialog);
  view.opener = masks.tiles[index];
  if (!dialog.open) dialog.showModal();
  showLayer(index);
  view.slider.focus();
}

function buildDialog(dialog) {
  view.built = true;
  const head = node(dialog, "header");
  view.title = node(head, "h2", { id: "mask-title" });
  const button = (text, label, act) => node(head, "button", { type: "button", class: "quiet", "aria-label": label }, text).addEventListener("click", act);
  button("\u2190", "Previous layer", () => showLayer(view.index - 1));
  button("\u2192", "Next layer", () => showLayer(view.index + 1));
  button("Close", "Close", () => dialog.close());
  const body = node(dialog, "div", { class: "enlarged" });
  view.stage = node(body, "div", { class: "stage" });
  view.canvas = node(view.stage, "canvas", { role: "img" });
  const below = node(view.stage, "div", { class: "below" });
  const scale = node(below, "span", { class: "scale" }, "1");
  view.scale = node(scale, "canvas", { width: 120, height: 1, "aria-hidden": "true" });
  view.most = node(scale, "span");
  view.place = node(below, "p", { class: "place" });
  const side = node(body, "div", { class: "side" });
  view.facts = node(side, "div");
  const stepper = node(side, "div", { class: "stepper" });
  view.name = node(stepper, "h3", { id: "block-name" });
  view.slider = node(stepper, "input", { type: "range", min: 0, value: 0, "aria-labelledby": "block-name" });
  view.text = node(stepper, "p", { role: "status" });
  node(side, "small", {}, "Arrow keys step through the blocks, widest first; Page Up and Page Down change the layer; Esc closes.");
  view.slider.addEventListener("input", () => showBlock(Number(view.slider.value)));
  view.canvas.addEventListener("pointermove", (event) => readEntry(event));
  dialog.addEventListener("keydown", (event) => onDialogKey(event));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => view.opener?.focus());
  window.addEventListener("resize", () => dialog.open && showLayer(view.index, view.block));
}

function onDialogKey(event) {
  const layers = { PageUp: -1, PageDown: 1 }, blocks = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: 1, ArrowDown: -1, Home: -Infinity, End: Infinity };
  if (event.key in layers) showLayer(view.index + layers[event.key]);
  else if (event.key in blocks) showBlock(clamp(view.block + blocks[event.key], 0, view.blocks.length));
  else return;
  event.preventDefault();
}

function showLayer(index, block = 0) {
  view.index = (index + masks.layers.length) % masks.layers.length;
  view.layer = masks.layers[view.index];
  view.opener = masks.tiles[view.index];
  view.blocks = blocksOf(view.layer);
  view.title.replaceChildren();
  dotted(view.title, view.layer.name);
  view.canvas.setAttribute("aria-label", `Blocks of ${view.layer.name}`);
  view.facts.replaceChildren();
  factList(view.facts, view.layer.facts, "fact-grid");
  view.slider.max = view.blocks.length;
  const side = Math.max(200, Math.min(view.stage.clientWidth, innerHeight - (innerWidth > 720 ? 190 : 420)));
  view.picture = paintMask(view.canvas, view.layer, side, topOf(view.layer));
  view.place.textContent = "Point at an entry to count its blocks.";
  paintScale(view.scale);
  view.most.textContent = `${topOf(view.layer)} blocks`;
  showBlock(block);
}

// Block 0 stands for all of them.
function showBlock(number) {
  view.block = number;
  view.slider.value = number;
  const context = view.canvas.getContext("2d");
  context.putImageData(view.picture, 0, 0);
  view.name.textContent = number ? `Block ${number} of ${view.blocks.length}` : `All ${view.blocks.length} blocks`;
  view.text.textContent = number ? blockText(view.blocks[number - 1], view.layer.shape) : "Move the slider to see single blocks.";
  view.slider.setAttribute("aria-valuetext", `${view.name.textContent}. ${view.text.textContent}`);
  if (number) outlineBlock(context, view.blocks[number - 1]);
}

function blockText([rowStart, rowWidth, colStart, colWidth], [rows, cols]) {
  const run = (start, width, length) => `${start}\u2013${(start + width - 1) % length}${start + width > length ? " (wraps around)" : ""}`;
  return `${rowWidth} rows, ${run(rowStart, rowWidth, rows)}; ${colWidth} columns, ${run(colStart, colWidth, cols)}.`;
}

// The rest fades; the block is framed, in two or four pieces where it wraps around.
function outlineBlock(context, [rowStart, rowWidth, colStart, colWidth]) {
  const { width, height } = context.canvas, [rows, cols] = view.layer.shape, line = 2 * (window.devicePixelRatio || 1);
  const boxes = pieces(rowStart, rowWidth, rows).flatMap(([top, bottom]) =>
    pieces(colStart, colWidth, cols).map(([left, right]) => [(left * width) / cols, (top * height) / rows, ((right - left) * width) / cols, ((bottom - top) * height) / rows]));
  context.fillStyle = `rgb(${blankColour(context.canvas).join(" ")} / 72%)`;
  context.beginPath();
  context.rect(0, 0, width, height);
  for (const box of boxes) context.rect(...box);
  context.fill("evenodd");
  context.strokeStyle = "#e8590c";
  context.lineWidth = line;
  for (const [x, y, w, h] of boxes) context.strokeRect(x, y, Math.max(w, line / 2), Math.max(h, line / 2));
}

function readEntry(event) {
  const box = view.canvas.getBoundingClientRect(), [rows, cols] = view.layer.shape;
  const row = clamp(Math.floor(((event.clientY - box.top) / box.height) * rows), 0, rows - 1);
  const col = clamp(Math.floor(((event.clientX - box.left) / box.width) * cols), 0, cols - 1);
  const inside = (at, start, width, length) => (at - start + length) % length < width;
  const count = view.blocks.filter(([r, h, c, w]) => inside(row, r, h, rows) && inside(col, c, w, cols)).length;
  view.place.textContent = `row ${row}, column ${col}: ${count} ${count === 1 ? "block" : "blocks"}`;
}
