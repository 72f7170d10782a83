// Drawing on canvases: squares of cells with their axes and cursor, strips and lines.
"use strict";

(() => {
  const { colors, number } = explorer;
  const FONT = '11px system-ui, "Segoe UI", Roboto, Arial, sans-serif';
  const MARGIN = { left: 58, top: 30, right: 10, bottom: 6 };

  const packed = (color) => 0xff000000 | (parseInt(color.slice(5, 7), 16) << 16) | (parseInt(color.slice(3, 5), 16) << 8) | parseInt(color.slice(1, 3), 16);

  // A canvas of so many CSS pixels, sharp on this screen; `isFluid`: the style sheet sets the size. Equal values are not written
  // again: writing a style and then reading a width costs a layout of the page.
  function sized(canvas, width, height, isFluid = false) {
    const ratio = window.devicePixelRatio || 1;
    const w = Math.round(width * ratio), h = Math.round(height * ratio);
    if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
    if (!isFluid && (canvas.style.width !== `${width}px` || canvas.style.height !== `${height}px`)) {
      Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    return context;
  }

  function polyline(context, points) {
    context.beginPath();
    for (const [x, y] of points) context.lineTo(x, y);
    context.stroke();
  }

  const spare = document.createElement("canvas");
  let image = null;

  // Cells as pixels of their own: `palette[level[i]]` for cell i.
  function cellsOf(level, rows, columns, palette) {
    const context = spare.getContext("2d");
    if (!image || image.width !== columns || image.height !== rows) {
      Object.assign(spare, { width: columns, height: rows });
      image = context.createImageData(columns, rows);
    }
    const pixels = new Uint32Array(image.data.buffer);
    const packedPalette = palette.map(packed);
    for (let i = 0; i < level.length; i++) pixels[i] = packedPalette[level[i]];
    context.putImageData(image, 0, 0);
    return spare;
  }

  // The distance of ticks, for at most `most` ticks: 1, 2 or 5 times a power of ten; a power of two if `count` is one.
  function tickStep(count, most) {
    if (Number.isInteger(Math.log2(count))) return 2 ** Math.max(0, Math.ceil(Math.log2(count / most)));
    const power = 10 ** Math.floor(Math.log10(Math.max(1, count / most)));
    return [1, 2, 5, 10].map((step) => step * power).find((step) => count / step <= most);
  }

  // A square of cells with query rows and key columns in tokens. Returns the position of the square on the canvas.
  function square(canvas, { level, cells, palette, perCell, count, columns = "key", segments = [], window: near = 0, isCausal = false }) {
    const ratio = window.devicePixelRatio || 1;
    const room = canvas.parentElement.parentElement.clientWidth - MARGIN.left - MARGIN.right;
    // Whole device pixels per cell where there is room: all cells are equally large.
    const most = Math.min(room, 620) * ratio;
    const side = (most >= cells ? Math.floor(most / cells) * cells : most) / ratio;
    const context = sized(canvas, MARGIN.left + side + MARGIN.right, MARGIN.top + side + MARGIN.bottom);
    context.imageSmoothingEnabled = most < cells;
    context.drawImage(cellsOf(level, cells, cells, palette), MARGIN.left, MARGIN.top, side, side);
    const { rule, quiet, ink } = colors();
    const pixels = side / (cells * perCell);
    context.lineWidth = 1;
    context.globalAlpha = 0.45;
    context.strokeStyle = ink;
    for (const length of segments) {
      if (length * pixels < 12) continue;
      for (let start = 0; start < count; start += length) {
        const size = (Math.min(start + length, count) - start) * pixels;
        const x = MARGIN.left + start * pixels + 0.5, y = MARGIN.top + start * pixels + 0.5;
        const above = isCausal ? [] : [[x + size - 1, y], [x, y]]; // causal: above the diagonal nothing is joined
        polyline(context, [[x, y], [x, y + size - 1], [x + size - 1, y + size - 1], ...above]);
      }
    }
    context.globalAlpha = 1;
    context.strokeStyle = colors().window;
    for (const isAfter of near && near < count ? (isCausal ? [false] : [false, true]) : []) { // the edges of the window
      const at = (row, column) => [MARGIN.left, MARGIN.top].map((from, i) => from + [column, row][isAfter ? 1 - i : i] * pixels);
      polyline(context, [at(near - 0.5, 0), at(count, count - near + 0.5)]);
    }
    context.strokeStyle = rule;
    context.strokeRect(MARGIN.left - 0.5, MARGIN.top - 0.5, side + 1, side + 1);
    context.fillStyle = quiet;
    const step = tickStep(count, Math.max(2, Math.floor(side / 70)));
    for (let at = 0; at < count; at += step) {
      const place = (at + 0.5) * pixels;
      if (at > 0 && place > side - 12) break;
      context.textAlign = at ? "center" : "left";
      context.textBaseline = "alphabetic";
      context.fillText(number(at), MARGIN.left + (at ? place : 0), MARGIN.top - 5);
      context.textAlign = "right";
      context.textBaseline = at ? "middle" : "top";
      context.fillText(number(at), MARGIN.left - 6, MARGIN.top + (at ? place : 0));
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText(`${columns} →`, MARGIN.left, 11);
    context.save();
    context.translate(11, MARGIN.top);
    context.rotate(-Math.PI / 2);
    context.textAlign = "right";
    context.fillText("← query", 0, 0);
    context.restore();
    return { side, cells, left: MARGIN.left, top: MARGIN.top };
  }

  // The row and column of a cell under the cursor, on a canvas of its own.
  function cursor(overlay, canvas, place, at) {
    const context = sized(overlay, parseFloat(canvas.style.width), parseFloat(canvas.style.height));
    if (!at) return;
    const size = place.side / place.cells;
    const x = place.left + at.column * size, y = place.top + at.row * size;
    context.strokeStyle = colors().mark;
    context.fillStyle = colors().mark;
    context.globalAlpha = 0.18;
    context.fillRect(place.left, y, place.side, Math.max(1, size));
    context.fillRect(x, place.top, Math.max(1, size), place.side);
    context.globalAlpha = 1;
    context.lineWidth = 1.5;
    context.strokeRect(x - 1, y - 1, Math.max(3, size) + 2, Math.max(3, size) + 2);
  }

  // A line of tokens in bins of one level each; `marks` are tokens, `spans` runs of them to outline.
  function strip(canvas, { level, palette, count, marks = [], spans = [], width }) {
    const height = 20;
    const context = sized(canvas, width, height, true);
    context.imageSmoothingEnabled = level.length > width;
    context.drawImage(cellsOf(level, 1, level.length, palette), 0, 3, width, height - 6);
    const { rule, mark, ink } = colors();
    context.strokeStyle = rule;
    context.strokeRect(0.5, 3.5, width - 1, height - 7);
    context.strokeStyle = ink;
    for (const [first, end] of spans) {
      context.strokeRect((first / count) * width + 0.5, 2.5, Math.max(1, ((end - first) / count) * width - 1), height - 5);
    }
    context.fillStyle = mark;
    for (const token of marks) context.fillRect(((token + 0.5) / count) * width - 1, 0, 2, height);
  }

  // Ticks in tokens under strips.
  function axis(canvas, count, width) {
    const context = sized(canvas, width, 18, true);
    context.fillStyle = colors().quiet;
    context.strokeStyle = colors().rule;
    const step = tickStep(count, Math.max(2, Math.floor(width / 90)));
    for (let at = 0; at < count; at += step) {
      const x = (at / count) * width;
      if (x > width - 24) break;
      context.textAlign = at ? "center" : "left";
      context.fillText(number(at), x, 15);
      context.fillRect(x, 0, 1, 4);
    }
  }

  // Lines on logarithmic axes: { points: [[x, y]], color, dash, label, labelAt }, and a mark at one x.
  function logLines(canvas, { lines, at, xTitle, yTitle, unit }) {
    const width = Math.min(canvas.parentElement.clientWidth, 760), height = 340;
    const context = sized(canvas, width, height);
    const box = { left: 62, right: 16, top: 24, bottom: 42 };
    const points = lines.flatMap((line) => line.points);
    const [x0, x1] = [Math.min(...points.map((p) => p[0])), Math.max(...points.map((p) => p[0]))].map(Math.log10);
    const y0 = Math.floor(Math.min(...points.map((p) => Math.log10(p[1])))), y1 = Math.ceil(Math.max(...points.map((p) => Math.log10(p[1]))));
    const X = (x) => box.left + ((Math.log10(x) - x0) / (x1 - x0 || 1)) * (width - box.left - box.right);
    const Y = (y) => height - box.bottom - ((Math.log10(y) - y0) / (y1 - y0 || 1)) * (height - box.top - box.bottom);
    const { rule, quiet, mark } = colors();
    context.fillStyle = quiet;
    context.strokeStyle = rule;
    const stepY = Math.ceil((y1 - y0) / 7);
    for (let power = y0; power <= y1; power += stepY) {
      polyline(context, [[box.left, Y(10 ** power)], [width - box.right, Y(10 ** power)]]);
      context.textAlign = "right";
      context.fillText(unit(10 ** power), box.left - 6, Y(10 ** power) + 4);
    }
    const octaves = Math.ceil((x1 - x0) / Math.log10(2) / Math.max(2, Math.floor((width - 80) / 76)));
    for (let power = Math.ceil(x0 / Math.log10(2) - 1e-9); 10 ** x1 >= 2 ** power; power += octaves) {
      context.textAlign = X(2 ** power) > width - box.right - 30 ? "right" : "center";
      context.fillText(number(2 ** power), X(2 ** power) + (context.textAlign === "right" ? 8 : 0), height - box.bottom + 16);
      context.fillRect(X(2 ** power), height - box.bottom, 1, 4);
    }
    context.textAlign = "left";
    context.fillText(yTitle, 4, 12);
    context.textAlign = "right";
    context.fillText(xTitle, width - box.right, height - 6);
    context.strokeStyle = mark;
    context.setLineDash([2, 3]);
    polyline(context, [[X(at), box.top], [X(at), height - box.bottom]]);
    for (const line of lines) {
      context.setLineDash(line.dash || []);
      context.strokeStyle = line.color;
      context.lineWidth = line.width || 2;
      polyline(context, line.points.map(([x, y]) => [X(x), Y(y)]));
      const here = line.points.reduce((best, p) => (Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best));
      context.setLineDash([]);
      context.fillStyle = line.color;
      context.beginPath();
      context.arc(X(here[0]), Y(here[1]), 4, 0, 7);
      context.fill();
    }
  }

  Object.assign(explorer, { axis, cellsOf, cursor, logLines, square, strip });
})();
