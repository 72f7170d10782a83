// The views: what each asks of `compute`, its markup, and how it draws the answer.
"use strict";

(() => {
  const { axis, cellsOf, colors, cursor, escaped, flops, headNames, levels, logLines, number, pairName, percent, plural, range,
    shortName, square, strip, table, times } = explorer;

  const SHARES = [1 / 256, 1 / 64, 1 / 16, 1 / 4, 1]; // where columns of many tokens change colour
  const atMost = (one) => ["1 in 256", "1 in 64", "1 in 16", "1 in 4"].map((share) => `at most ${share} ${one}`);
  // What the colours of cells of many pairs mean: a cell with a share of more than limits[i] has at least the colour of names[i + 1].
  const JOINS = { title: "joined pairs in a cell", limits: SHARES, names: [...atMost("pairs"), "more, at most all", "more joins than pairs: branches overlap"] };
  const SEEN = { title: "seen pairs in a cell", limits: [1 / 16, 1 / 4, 1 / 2, 1 - 1e-9], names: [...atMost("pairs").slice(2), "at most half", "more than half", "all"] };

  const legend = (items) => items
    .map(([color, text]) => (color ? `<li><i style="background:${color}"></i>${escaped(text)}</li>` : `<li class="title">${escaped(text)}</li>`))
    .join("");

  // The level of each cell: its count where a cell is a pair, else by its share; and what the levels mean. `branches` is the most
  // that a head has: the colours of all heads, and of all positions of a slider, mean the same.
  function shaded({ counts, cells, tokensPerCell: c }, { isCausal, numTokens, branches = 1, near = null, joined = false, scale = JOINS }) {
    const level = new Uint8Array(counts.length);
    let names, palette, title = null;
    if (c === 1 || joined) {
      for (let i = 0; i < counts.length; i++) level[i] = joined ? counts[i] > 0 : counts[i];
      palette = levels(joined ? 1 : branches);
      names = joined ? [c === 1 ? "joined" : "some pair joined"] : palette.map((_, i) => plural(i + 1, "branch", "branches"));
    } else {
      const { limits } = scale;
      for (let i = 0; i < cells; i++) {
        const rows = Math.min(c, numTokens - i * c);
        for (let j = 0; j < cells; j++) {
          const at = i * cells + j;
          if (!counts[at]) continue;
          const columns = Math.min(c, numTokens - j * c);
          const share = counts[at] / (isCausal && i === j ? (rows * (rows + 1)) / 2 : rows * columns);
          let above = 1;
          while (above <= limits.length && share > limits[above - 1]) above++;
          level[at] = above;
        }
      }
      ({ names, title } = scale);
      palette = levels(names.length);
    }
    if (near && !joined) {
      for (let i = 0; i < counts.length; i++) if (near[i] && near[i] === counts[i]) level[i] = palette.length + 1;
      palette = [...palette, colors().window];
      names = [...names, "window or first tokens alone"];
    }
    palette = [colors().apart, ...palette, colors().future];
    if (isCausal) {
      for (let i = 0; i < cells; i++) for (let j = i + 1; j < cells; j++) level[i * cells + j] = palette.length - 1;
    }
    const items = [...(title ? [[null, title]] : []), [palette[0], "none"], ...names.map((name, i) => [palette[i + 1], name])];
    if (isCausal) items.push([palette.at(-1), "future"]);
    return { level, palette, items };
  }

  // Where a picture has fewer cells than pairs, what a cell is.
  const grain = (c, numTokens, each) => (c === 1 ? "" : `${number(numTokens)} tokens are too many to draw one by one: each cell is a square of
    ${number(c)} x ${number(c)} pairs. Its colour shows ${each}.`);

  const ofHeads = (state) => (state.num_heads === state.num_kv_heads ? "" :
    ` Query heads share a key/value head in groups of ${state.num_heads / state.num_kv_heads}; the pattern is that of the key/value head.`);

  // The pointer and the arrow keys move a cursor over a square; `say` puts it in words, `pick` takes it.
  function explore(el, cell, { say, pick }) {
    const [canvas, overlay] = el.querySelectorAll(".stack canvas"), readout = el.querySelector(".readout");
    let place = null, at = null;
    const show = () => {
      cursor(overlay, canvas, place, at);
      readout.textContent = at ? say(at) : `Point at a ${cell}, or move with the arrow keys.`;
    };
    const move = (row, column) => {
      at = { row: Math.min(Math.max(row, 0), place.cells - 1), column: Math.min(Math.max(column, 0), place.cells - 1) };
      show();
    };
    canvas.addEventListener("pointermove", (event) => {
      if (!place) return;
      const box = canvas.getBoundingClientRect(), scale = parseFloat(canvas.style.width) / box.width;
      const x = (event.clientX - box.left) * scale - place.left, y = (event.clientY - box.top) * scale - place.top;
      if (x < 0 || y < 0 || x >= place.side || y >= place.side) return;
      move(Math.floor((y / place.side) * place.cells), Math.floor((x / place.side) * place.cells));
    });
    canvas.addEventListener("pointerleave", () => {
      at = null;
      if (place) show();
    });
    canvas.addEventListener("click", () => at && pick && pick(at));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.key === "Enter" && at && pick) pick(at);
      if (!step || !place) return;
      event.preventDefault();
      const by = event.shiftKey ? 10 : 1;
      move((at ? at.row : 0) + step[0] * by, (at ? at.column : 0) + step[1] * by);
    });
    return (next) => {
      place = next;
      if (at) move(at.row, at.column);
      else show();
    };
  }

  const stack = (name) => `<div class="stack"><canvas tabindex="0" role="img" aria-label="${name}"></canvas><canvas aria-hidden="true"></canvas></div>`;

  const headSelect = `<label>Head <select data-state="head"></select></label>`;

  // The tokens of a cell's row or column.
  const tokensOf = (cell, c, numTokens) => [cell * c, Math.min(numTokens, (cell + 1) * c)];

  const mostBranches = (classes) => Math.max(...classes.map(({ branches }) => branches.length));

  // Classes hold key/value heads; what is looked at is a query head.
  const classOf = (list, state) => list.findIndex(({ heads }) => heads.includes(explorer.kvHead(state)));

  // -- who attends to whom -----------------------------------------------------------------------------------------------------

  const pairsView = {
    id: "pairs",
    title: "Who attends to whom",
    parts: ["picture"],
    markup: `<h2>Who attends to whom</h2><p class="about"></p>
      <div class="tools">${headSelect}
        <label><input type="radio" name="shade" value="many" checked> how many branches join</label>
        <label><input type="radio" name="shade" value="any"> joined or not</label></div>
      <div class="side"><figure>${stack("Queries down, keys across. Arrow keys move, Enter opens the view of the query.")}
        <output class="readout"></output></figure>
        <div><ul class="legend tall"></ul><h3>Heads that keep the same tokens</h3><div class="multiples"></div></div></div>`,
    build(el, app) {
      this.place = explore(el, "pair", {
        say: (at) => this.say(at),
        pick: ({ row }) => {
          app.set({ query: Math.min(row * this.found.tokensPerCell, app.state.seq_len - 1), view: "query" });
          document.getElementById("tab-query").focus(); // the canvas that had the focus is about to go
        },
      });
      for (const input of el.querySelectorAll("[name=shade]")) input.addEventListener("change", () => app.draw());
    },
    say({ row, column }) {
      const { branches, counts, cells, tokensPerCell: c } = this.found, { seq_len: n, is_causal: isCausal } = this.state;
      const count = counts[row * cells + column];
      if (c === 1) {
        const names = explorer.joining(branches, row, column, isCausal).map(pairName).join(" and ");
        const what = count ? `joined by ${plural(count, "branch", "branches")}, ${names}` : isCausal && column > row ? "in the future" : "not joined";
        return `query ${number(row)}, key ${number(column)}: ${what}`;
      }
      const rows = tokensOf(row, c, n), columns = tokensOf(column, c, n);
      const pairs = number((rows[1] - rows[0]) * (columns[1] - columns[0]));
      return `queries ${range(...rows)}, keys ${range(...columns)}: ${number(count)} of ${pairs} pairs joined; a pair that two branches join counts twice`;
    },
    render(el, { picture, state }, app, isMoving) {
      const classes = explorer.headClasses(state), chosen = classOf(classes, state);
      this.found = { ...picture, branches: classes[chosen].branches };
      this.state = state;
      const joined = el.querySelector("[name=shade]:checked").value === "any";
      const options = { isCausal: state.is_causal, numTokens: state.seq_len, branches: mostBranches(classes), joined };
      const { level, palette, items } = shaded(this.found, { ...options, near: inNear(state) });
      el.querySelector(".about").textContent =
        `Queries down, keys across; ${joined ? "a pair is marked when any branch joins it" : "the colour shows how many branches join a pair"}` +
        ` for head ${state.head}. Outlined squares are segments${state.window ? ", lines the edges of the window" : ""}. A click, or Enter, opens the query in the view One query. ` +
        grain(this.found.tokensPerCell, state.seq_len, joined ? "whether any of its pairs is joined" : "how many of its pairs are joined; a pair that two branches join counts twice") + ofHeads(state);
      this.place(square(el.querySelector("canvas"), {
        level, palette, cells: this.found.cells, perCell: this.found.tokensPerCell, count: state.seq_len,
        segments: explorer.segmentsOf(this.found.branches).map(({ length }) => length), window: state.window ?? 0, isCausal: state.is_causal,
      }));
      el.querySelector(".legend").innerHTML = legend(items);
      multiples(el.querySelector(".multiples"), classes, chosen, options, state, app, isMoving);
    },
  };

  // The pairs of a picture's cells that are in the window or have a global token, where there are any.
  const inNear = (state, most) => (state.window || state.global_tokens) &&
    explorer.picture(explorer.headBranches(state, 0).filter(explorer.isNear), state.seq_len, state.is_causal, most).counts;

  // A small picture for each heads that keep the same; pressing one looks at its first head.
  function multiples(box, classes, chosen, options, state, app, isMoving) {
    const key = classes.map(({ heads }) => heads.join()).join(";");
    if (box.dataset.key !== key) {
      box.dataset.key = key;
      box.innerHTML = classes.map(() => `<button type="button"><canvas aria-hidden="true"></canvas><span></span></button>`).join("");
      box.querySelectorAll("button").forEach((button) => button.addEventListener("click", () => {
        const group = app.state.num_heads / app.state.num_kv_heads;
        app.set({ head: Number(button.dataset.head) * group });
      }));
    }
    box.querySelectorAll("button").forEach((button, i) => {
      const { heads, branches } = classes[i];
      button.dataset.head = heads[0];
      button.setAttribute("aria-pressed", i === chosen);
      button.querySelector("span").textContent = `${headNames(heads, state)}: offset ${explorer.segmentsOf(branches).map(({ offset }) => offset).join(", ") || "none"}`;
      if (isMoving && state.seq_len > 512) return; // they follow when the slider rests
      const canvas = button.querySelector("canvas");
      const few = explorer.picture(branches, state.seq_len, state.is_causal, 96);
      const { level, palette } = shaded(few, { ...options, near: inNear(state, 96) });
      if (canvas.width !== few.cells) Object.assign(canvas, { width: few.cells, height: few.cells });
      canvas.getContext("2d").drawImage(cellsOf(level, few.cells, few.cells, palette), 0, 0);
    });
  }

  // -- one query ---------------------------------------------------------------------------------------------------------------

  const BINS = 720; // of a strip

  const queryView = {
    id: "query",
    title: "One query",
    parts: ["query"],
    markup: `<h2>One query's keys</h2><p class="about"></p>
      <div class="tools">${headSelect}<label>Query <input inputmode="numeric" data-state="query"></label>
        <input type="range" data-state="query" aria-label="Query, slider" min="0"></div>
      <p class="conclusion" aria-live="polite"></p><div class="strips" data-of="branches"></div><output class="readout"></output>
      <ul class="legend"></ul>
      <h3>The same query in every head</h3><div class="strips" data-of="heads"></div><div class="numbers"></div>`,
    build(el) {
      const readout = el.querySelector(".readout"), strips = el.querySelector("[data-of=branches]");
      const rest = () => (readout.textContent = "Point at a strip to name its tokens.");
      strips.addEventListener("pointermove", ({ target, clientX }) => {
        if (target.tagName !== "CANVAS" || target.className === "axis") return;
        const box = target.getBoundingClientRect();
        readout.textContent = this.say(Math.min(Math.max((clientX - box.left) / box.width, 0), 1 - 1e-9));
      });
      strips.addEventListener("pointerleave", rest);
      rest();
    },
    // The tokens at a place of the strips, from 0 to 1, and the branches in which the query sees them.
    say(place) {
      const { runs, state } = this.found, edges = edgesOf(state.seq_len), [first, end] = edges.slice(Math.floor(place * (edges.length - 1)));
      const seen = runs.map((run) => [run, binned([run], [first, end])[0]]).filter(([, count]) => count);
      const where = seen.map(([run, count]) => `${end - first === 1 ? "" : `${number(count)} `}in ${pairName(run)}`).join(", ");
      return `query ${number(state.query)}, key${end - first === 1 ? "" : "s"} ${range(first, end)}: ${seen.length ? `seen ${where}` : "not seen"}`;
    },
    render(el, { query, state }) {
      this.found = { runs: query.runs, state };
      const { runs, keys, joins, farthest } = query;
      el.querySelector(".about").textContent = "Each strip is the whole sequence; the outline is the query's segment, window or first tokens, the mark the query." +
        (state.seq_len > BINS ? ` ${number(state.seq_len)} tokens are too many to draw one by one: each of ${BINS} columns is coloured by the share of its tokens that are seen.` : "");
      el.querySelector(".conclusion").textContent = joins
        ? `Query ${number(state.query)} of head ${state.head} sees ${keys === null ? `at most ${plural(joins, "key")}` : plural(keys, "key")}` +
          `${keys !== null && joins > keys ? `, some in several branches (${number(joins)} scores)` : ""}; the farthest is ${plural(farthest, "token")} away.`
        : `Query ${number(state.query)} of head ${state.head} sees no key: no branch keeps it in this head. Its output is 0.`;
      const classes = explorer.headClasses(state), most = mostBranches(classes), edges = edgesOf(state.seq_len);
      const rows = [{ name: "all branches", text: plural(joins, runs.length > 1 ? "score" : "key"), counted: binned(runs, edges) },
        ...runs.map((run) => ({ name: shortName(run), text: plural(run.rows, "key"), counted: binned([run], edges), spans: [[run.start, run.end]] }))];
      el.querySelector(".legend").innerHTML = legend(strips(el.querySelector("[data-of=branches]"), rows, state, most));
      strips(el.querySelector("[data-of=heads]"), classes.map(({ heads, branches }) => {
        const found = explorer.queryKeys(state, branches);
        return { name: headNames(heads, state), text: found.keys === null ? plural(found.joins, "score") : plural(found.keys, "key"), counted: binned(found.runs, edges) };
      }), state, most);
      el.querySelector(".numbers").innerHTML = table(`Branches of head ${state.head}`, ["branch", "offset", "segment or window", "keeps the query", "keys"],
        runs.map((run) => [shortName(run), number(run.offset), range(run.start, run.end), run.keeps ? "yes" : "no", number(run.rows)]));
    },
  };

  // Strips of tokens over the whole sequence: { name, text, counted: how many in each bin, spans to outline }; returns the legend of the colours.
  function strips(box, rows, state, colours) {
    if (box.dataset.count !== String(rows.length)) {
      box.dataset.count = rows.length;
      box.innerHTML = `${rows.map(() => `<span></span><canvas aria-hidden="true"></canvas><span></span>`).join("")}<span></span><canvas class="axis" aria-hidden="true"></canvas><span></span>`;
    }
    const n = state.seq_len, edges = edgesOf(n), single = edges.length === n + 1;
    const palette = [colors().apart, ...(single ? levels(colours) : levels(SHARES.length + 1))];
    const spans = box.querySelectorAll("span"), canvases = box.querySelectorAll("canvas"), width = Math.max(1, canvases[0].clientWidth);
    rows.forEach(({ name, text, counted, spans: outlined }, i) => {
      spans[2 * i].textContent = name;
      spans[2 * i + 1].textContent = text;
      const level = counted.map((count, bin) => {
        const share = count / (edges[bin + 1] - edges[bin]);
        return !count ? 0 : single ? count : share > 1 ? SHARES.length + 1 : 1 + SHARES.findIndex((limit) => share <= limit);
      });
      strip(canvases[i], { level, palette, count: n, marks: [state.query], spans: outlined, width });
    });
    axis(canvases[rows.length], n, width);
    const names = single ? palette.slice(1).map((_, i) => plural(i + 1, "branch", "branches")) : [...atMost("tokens"), "more, at most all", "seen in several branches"];
    return [[palette[0], "not seen"], ...names.map((name, i) => [palette[i + 1], name]), [colors().mark, "the query"]];
  }

  // The tokens at which the bins of a strip begin, and its end.
  const edgesOf = (n) => Array.from({ length: Math.min(n, BINS) + 1 }, (_, i) => Math.floor((i * n) / Math.min(n, BINS)));

  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // The number of keys of some runs in each bin.
  function binned(runs, edges) {
    const counts = new Float64Array(edges.length - 1);
    const below = (run, token) => Math.min(run.rows, explorer.numKept(token, run.rate, run.first));
    for (const run of runs.flatMap(({ parts }) => parts)) {
      if (!run.rows) continue;
      for (let i = 0; i + 1 < edges.length; i++) counts[i] += below(run, edges[i + 1]) - below(run, edges[i]);
    }
    return counts;
  }

  // -- tiles -------------------------------------------------------------------------------------------------------------------

  const tilesView = {
    id: "tiles",
    title: "Tiles",
    parts: ["tiles"],
    markup: `<h2>Tiles that FlexAttention visits</h2><p class="about"></p>
      <div class="tools">${headSelect}<label>Tile <select data-state="block_size"></select></label></div>
      <p class="conclusion" aria-live="polite"></p>
      <div class="side"><figure>${stack("Tiles: queries down, keys across. Arrow keys move.")}<output class="readout"></output></figure>
        <div><ul class="legend tall"></ul></div></div><div class="numbers"></div>`,
    build(el) {
      this.place = explore(el, "tile", { say: (at) => this.say(at) });
    },
    say({ row, column }) {
      const { each, cells, group, size, n } = this.found;
      const at = row * cells + column, where = `queries ${range(...tokensOf(row, group * size, n))}, keys ${range(...tokensOf(column, group * size, n))}`;
      if (group === 1) return `${where}: ${each.fullIn[at] ? "full" : each.visitedIn[at] ? "visited, in part" : "not visited"}`;
      return `${where}: ${number(each.visitedIn[at])} tiles visited, ${number(each.fullIn[at])} of them full`;
    },
    render(el, { tiles, state }) {
      for (const part of [".side", ".numbers"]) el.querySelector(part).hidden = Boolean(tiles.why);
      if (tiles.why) {
        el.querySelector(".conclusion").textContent = tiles.why;
        return;
      }
      const chosen = classOf(tiles.heads, state), each = tiles.heads[chosen], size = state.block_size;
      const waste = ({ pairs }, visited) => (pairs ? `${times((visited * size * size) / Number(pairs))}x` : "-");
      el.querySelector(".about").textContent = "A visited tile is computed whole. Raw: one mask over the sequence as it is. Packed: the kept rows of " +
        `a branch, segment after segment, one mask per branch, near pairs too. Waste is pairs in visited tiles per useful pair.${ofHeads(state)} ` +
        (tiles.group === 1 ? "" : `${number(tiles.blocks)} tiles per side are too many to draw: each cell is ${tiles.group} x ${tiles.group} tiles.`);
      el.querySelector(".conclusion").textContent = `Head ${state.head} visits ${percent(each.partial + each.full, tiles.tiles)} of the tiles raw: ` +
        `waste ${waste(each, each.partial + each.full)}; packed ${waste(each, each.packed)}.`;
      this.found = { each, cells: tiles.cells, group: tiles.group, size, n: state.seq_len };
      const { level, palette, items } = tileLevels(each, tiles, state);
      this.place(square(el.querySelector("canvas"), {
        level, palette, cells: tiles.cells, perCell: size * tiles.group, count: tiles.cells * size * tiles.group,
      }));
      el.querySelector(".legend").innerHTML = legend(items);
      el.querySelector(".numbers").innerHTML = table("Tiles per head", ["heads", "visited", "of all", "full", "waste raw", "packed tiles", "waste packed"],
        tiles.heads.map((one) => [headNames(one.heads, state), number(one.partial + one.full), percent(one.partial + one.full, tiles.tiles), number(one.full),
          waste(one, one.partial + one.full), number(one.packed), waste(one, one.packed)]), chosen);
    },
  };

  function tileLevels({ visitedIn, fullIn }, { cells, group, blocks }, state) {
    const { scale, apart, future } = colors();
    const palette = [apart, scale[0], scale[2], scale[5], future];
    const level = new Uint8Array(cells * cells);
    for (let i = 0; i < cells; i++) {
      const rows = Math.min(group, blocks - i * group);
      for (let j = 0; j < cells; j++) {
        const at = i * cells + j, columns = Math.min(group, blocks - j * group);
        if (state.is_causal && j > i) level[at] = 4;
        else if (!visitedIn[at]) level[at] = 0;
        else if (fullIn[at] === rows * columns) level[at] = 3;
        else level[at] = group === 1 || 2 * visitedIn[at] >= rows * columns ? 2 : 1;
      }
    }
    const items = [[palette[0], "none visited"], ...(group === 1 ? [] : [[palette[1], "less than half visited"]]),
      [palette[2], group === 1 ? "visited, in part" : "half or more visited"], [palette[3], "full"]];
    return { level, palette, items: state.is_causal ? [...items, [future, "future"]] : items };
  }

  // -- cost --------------------------------------------------------------------------------------------------------------------

  const costView = {
    id: "cost",
    title: "Cost",
    parts: [],
    markup: `<h2>Pairs against dense attention</h2><p class="about">Scored pairs over all key/value heads, a pair that m branches of segments join counted m times, and one of the window or the first tokens once.
      A forward takes 4 floating-point operations per pair and element of a head.</p>
      <div class="tools"><label>Elements per head <input inputmode="numeric" data-state="head_dim"></label></div>
      <p class="conclusion" aria-live="polite"></p>
      <figure><canvas role="img" aria-label="Pairs against tokens, dilated and dense; the table below has the numbers"></canvas>
      <ul class="legend"></ul></figure><div class="numbers"></div>`,
    build() {},
    render(el, { pairs, state }) {
      const n = state.seq_len, ratio = Number(pairs.dense) / Number(pairs.total);
      el.querySelector(".conclusion").textContent = !pairs.total ? "No pair is scored." : ratio >= 1
        ? `At ${plural(n, "token")} the pattern scores ${percent(pairs.total, pairs.dense)} of the pairs of dense attention, ${times(ratio)} times fewer.`
        : `At ${plural(n, "token")} the pattern scores ${times(1 / ratio)} times the pairs of dense attention: its branches overlap.`;
      const lengths = Array.from({ length: 49 }, (_, i) => Math.round(n * 2 ** ((i - 24) / 4))).filter((tokens) => tokens >= 1 && tokens <= 2 ** 31);
      const counted = lengths.map((tokens) => [tokens, explorer.countPairs(state, tokens)]);
      const { accent, quiet } = colors();
      const points = (key) => counted.filter(([, found]) => found[key]).map(([tokens, found]) => [tokens, Number(found[key])]);
      const lines = [{ points: points("dense"), color: quiet, dash: [6, 4], width: 1.5 }, { points: points("total"), color: accent, width: 2.5 }];
      const short = (value) => `10${[...String(Math.round(Math.log10(value)))].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
      logLines(el.querySelector("canvas"), { lines: lines.filter((line) => line.points.length), at: n, xTitle: "tokens", yTitle: "pairs", unit: short });
      el.querySelector(".legend").innerHTML = legend([[accent, "this pattern"], [quiet, "dense attention (dashed)"], [colors().mark, `${number(n)} tokens`]]);
      const group = BigInt(state.num_heads / state.num_kv_heads);
      const work = (count) => flops(4n * BigInt(state.head_dim) * group * count);
      el.querySelector(".numbers").innerHTML = table("Pairs of each branch", ["branch", ofHeads(state) ? "key/value heads" : "heads", "pairs", "share", "of dense", "forward"], [
        ...pairs.branches.map((count, i) => [shortName(explorer.allBranchesOf(state)[i]),
          number(sum([...explorer.offsetsOf(state, i).values()])), number(count), pairs.total ? percent(count, pairs.total) : "-",
          percent(count, pairs.dense), work(count)]),
        ["all branches", number(state.num_kv_heads), number(pairs.total), "100 %", percent(pairs.total, pairs.dense), work(pairs.total)],
        ["dense attention", number(state.num_kv_heads), number(pairs.dense), "-", "100 %", work(pairs.dense)],
      ], pairs.branches.length);
    },
  };

  // -- layers ------------------------------------------------------------------------------------------------------------------

  const QUICKLY_REACHED = 1024;

  const layersView = {
    id: "layers",
    title: "Layers",
    // All pairs of many tokens take longer than a frame: while a slider moves, only the query's row follows it.
    parts: (state, isMoving) =>
      state.seq_len > explorer.MOST_REACHED || (isMoving && state.seq_len > QUICKLY_REACHED) ? ["reachOf"] : ["reach", "reachOf"],
    markup: `<h2>Reach over layers</h2><p class="about"></p>
      <div class="tools"><label>Layers <input inputmode="numeric" data-state="layers"></label>
        <input type="range" data-state="layers" aria-label="Layers, slider" min="1" max="12">
        <label>Query <input inputmode="numeric" data-state="query"></label></div>
      <p class="conclusion" aria-live="polite"></p>
      <div class="side"><figure>${stack("What each query reaches. Queries down, tokens across. Arrow keys move, Enter takes the query.")}
        <output class="readout"></output></figure><div><ul class="legend tall"></ul></div></div>
      <div class="strips"></div><div class="numbers"></div>`,
    build(el, app) {
      this.place = explore(el, "pair", {
        say: (at) => this.say(at),
        pick: ({ row }) => app.set({ query: Math.min(row * this.found.tokensPerCell, app.state.seq_len - 1) }),
      });
    },
    say({ row, column }) {
      const { counts, cells, tokensPerCell: c } = this.found, { seq_len: n, layers } = this.state;
      const count = counts[row * cells + column], after = `after ${plural(layers, "layer")}`;
      if (c === 1) return `query ${number(row)} ${count ? "has seen" : "has not seen"} token ${number(column)} ${after}`;
      const rows = tokensOf(row, c, n), columns = tokensOf(column, c, n);
      return `queries ${range(...rows)}, tokens ${range(...columns)}: ${number(count)} of ${number((rows[1] - rows[0]) * (columns[1] - columns[0]))} pairs ${after}`;
    },
    render(el, { reach, reachOf, state }, app, isMoving) {
      const waits = isMoving && !reach && state.seq_len <= explorer.MOST_REACHED;
      for (const name of [".conclusion", ".side", ".numbers"]) el.querySelector(name).classList.toggle("stale", waits);
      if (waits) {
        reachStrip(el.querySelector(".strips"), reachOf, state);
        return;
      }
      this.state = state;
      el.querySelector(".side").hidden = !reach;
      el.querySelector(".about").textContent = "All heads and branches together, with the residual connection: after a layer a token has seen what the tokens that " +
        "it attends to had seen before. " + (reach ? grain(explorer.tokensPerCell(state.seq_len), state.seq_len, "how many of its pairs are seen")
        : `All pairs are followed up to ${number(explorer.MOST_REACHED)} tokens; here only the query's own row.`);
      el.querySelector(".conclusion").textContent = conclusion(reach, reachOf, state);
      if (reach) {
        this.found = explorer.reachPicture(reach, state.seq_len);
        const { level, palette, items } = shaded(this.found, { isCausal: state.is_causal, numTokens: state.seq_len, joined: this.found.tokensPerCell === 1, scale: SEEN });
        if (this.found.tokensPerCell === 1) items[1][1] = "seen";
        this.place(square(el.querySelector("canvas"), {
          level, palette, cells: this.found.cells, perCell: this.found.tokensPerCell, count: state.seq_len, columns: "token seen",
        }));
        el.querySelector(".legend").innerHTML = legend(items);
      }
      el.querySelector(".strips").hidden = !reachOf;
      if (reachOf) reachStrip(el.querySelector(".strips"), reachOf, state);
      el.querySelector(".numbers").innerHTML = layerTable(reach, reachOf, state);
    },
  };

  function conclusion(reach, reachOf, state) {
    if (reach) {
      const every = state.is_causal ? "every token has seen every token before it" : "every token has seen every other";
      const seen = reach.counts.at(-1), needs = plural(reach.counts.length - 1, "layer");
      return seen === reach.every ? `After ${needs} ${every}.` : !reach.isFinal ? `Not after ${needs}; more are not followed.`
        : `Never: some tokens stay unseen by others, however many layers there are. ${percent(seen, reach.every)} of the pairs are ever seen.`;
    }
    if (!reachOf) return "Too many tokens to follow even one query.";
    const { counts, every, isFinal } = reachOf;
    const needs = plural(counts.length - 1, "layer");
    return counts.at(-1) === every ? `Query ${number(state.query)} has seen ${state.is_causal ? "every token before it" : "every token"} after ${needs}.`
      : `Query ${number(state.query)} sees ${number(counts.at(-1))} of ${number(every)} tokens, after ${needs}; ${isFinal ? "more layers add none" : "more are not followed"}.`;
  }

  // What the query has seen after the shown layer, over the whole sequence.
  function reachStrip(box, { bits }, state) {
    const edges = edgesOf(state.seq_len), counted = new Float64Array(edges.length - 1);
    for (let bin = 0; bin < counted.length; bin++) for (let token = edges[bin]; token < edges[bin + 1]; token++) counted[bin] += bits[token];
    strips(box, [{ name: `query ${number(state.query)}`, text: plural(sum(counted), "token"), counted }], state, 1);
  }

  function layerTable(reach, reachOf, state) {
    const count = Math.max(reach ? reach.counts.length : 0, reachOf ? reachOf.counts.length : 0);
    const at = (list, i) => list[Math.min(i, list.length - 1)];
    const rows = Array.from({ length: count }, (_, i) => [number(i),
      ...(reach ? [number(at(reach.counts, i)), percent(at(reach.counts, i), reach.every)] : []),
      ...(reachOf ? [number(at(reachOf.counts, i)), percent(at(reachOf.counts, i), reachOf.every)] : [])]);
    return table("What has been seen after each layer", ["layers", ...(reach ? ["pairs", "of all"] : []),
      ...(reachOf ? [`tokens seen by query ${number(state.query)}`, "of all"] : [])], rows, Math.min(state.layers, count - 1));
  }

  explorer.VIEWS = [pairsView, queryView, tilesView, costView, layersView];
})();
