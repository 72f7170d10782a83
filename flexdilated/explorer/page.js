// The page: controls, tabs, one state. A change marks the page; the next frame computes what the view needs and draws it.
"use strict";

(() => {
  const { LIMITS, PRESETS, VIEWS, escaped, flops, number, percent } = explorer;
  const byId = (id) => document.getElementById(id);
  const SIZES = 8; // steps of a slider per doubling

  const app = { state: explorer.fromAddress(location.hash), set, draw: () => mark() };
  const REST = 150; // milliseconds without a change, after which a slider no longer moves
  let marked = false, written = 0, current = null, changed = 0, resting = 0;

  function set(changes) {
    Object.assign(app.state, changes);
    mark();
  }

  function mark() {
    if (marked) return;
    marked = true;
    const isMoving = performance.now() - changed < REST;
    changed = performance.now();
    requestAnimationFrame(() => {
      marked = false;
      render(isMoving);
    });
    clearTimeout(resting);
    if (isMoving) resting = setTimeout(render, REST);
  }

  // -- sliders: those of sizes have eight steps per doubling, whole numbers ---------------------------------------------------

  const SIZED = ["window", "seq_len", "segment_lengths"];
  const sizeAt = (step) => (step < 0 ? null : Math.round(2 ** Math.floor(step / SIZES) * (1 + (step % SIZES) / SIZES)));
  const stepOf = (size) => {
    const octave = Math.floor(Math.log2(Math.max(size, 1)));
    return SIZES * octave + Math.floor((Math.max(size, 1) / 2 ** octave - 1) * SIZES);
  };

  function slide(slider, key, value) {
    const isNumber = typeof value === "number";
    slider.value = !isNumber ? slider.min : SIZED.includes(key) ? stepOf(value) : value;
    slider.setAttribute("aria-valuetext", isNumber ? number(value) : String(value ?? "none"));
  }

  // -- controls: `data-number` and `data-slider` name a number of the state, `data-flag` and `data-choice` a rule ----------------

  function branchRow(i) {
    const field = (key, symbol, label, least, last) => `<label for="${symbol}${i}">${symbol}</label>
      <input id="${symbol}${i}" inputmode="numeric" data-number="${key}.${i}" aria-label="${label} of branch ${i + 1}">
      <input type="range" min="${least}" max="${last}" data-slider="${key}.${i}" aria-label="${label} of branch ${i + 1}, slider">`;
    return `<div class="branch" role="group" aria-label="Branch ${i + 1}">${field("segment_lengths", "w", "Segment length", 0, 160)}
      <button type="button" data-remove="${i}" aria-label="Remove branch ${i + 1}">&times;</button>${field("dilation_rates", "r", "Dilation rate", 1, 64)}</div>`;
  }

  function removeBranch(i) {
    const without = (values) => values.filter((_, j) => j !== i);
    set({ segment_lengths: without(app.state.segment_lengths), dilation_rates: without(app.state.dilation_rates) });
    byId("add").focus();
  }

  function addBranch() {
    const { segment_lengths: lengths, dilation_rates: rates } = app.state;
    const twice = (value, most) => (typeof value === "number" && value >= 1 ? Math.min(2 * value, most) : 1);
    set({
      segment_lengths: [...lengths, twice(lengths.at(-1) ?? 8, LIMITS.segment_length)],
      dilation_rates: [...rates, lengths.length ? twice(rates.at(-1), 64) : 1],
    });
  }

  function buildControls() {
    byId("presets").innerHTML = Object.entries(PRESETS)
      .map(([key, { title }]) => `<button type="button" data-preset="${key}">${escaped(title)}</button>`).join("");
    const controls = byId("controls");
    controls.addEventListener("submit", (event) => event.preventDefault());
    controls.addEventListener("click", ({ target: { id, dataset } }) => {
      if (dataset.preset) set(structuredClone(PRESETS[dataset.preset].state));
      if (dataset.remove) removeBranch(Number(dataset.remove));
      if (id === "add") addBranch();
    });
    controls.addEventListener("input", ({ target: { checked, dataset, value } }) => {
      if (dataset.number) setNumber(dataset.number, dataset.number === "window" && !value.trim() ? null : explorer.parseInteger(value));
      if (dataset.slider) setNumber(dataset.slider, SIZED.includes(dataset.slider.split(".")[0]) ? sizeAt(Number(value)) : Number(value));
      if (dataset.flag) set({ [dataset.flag]: checked });
      if (dataset.choice) set({ [dataset.choice]: value });
    });
    byId("copy").addEventListener("click", copy);
  }

  // A number, or that of a branch. Key/value heads follow the query heads as long as both are the same.
  function setNumber(name, value) {
    const [key, i] = name.split(".");
    if (i) set({ [key]: Object.assign([...app.state[key]], { [i]: value }) });
    else set({ [key]: value, ...(key === "num_heads" && app.state.num_kv_heads === app.state.num_heads ? { num_kv_heads: value } : {}) });
  }

  function fillControls(state) {
    const count = Math.max(state.segment_lengths.length, state.dilation_rates.length), box = byId("branches");
    if (box.querySelectorAll(".branch").length !== count) box.innerHTML = Array.from({ length: count }, (_, i) => branchRow(i)).join("");
    for (const input of byId("controls").querySelectorAll("[data-number], [data-slider]")) {
      const [key, i] = (input.dataset.number ?? input.dataset.slider).split("."), value = i ? state[key][i] ?? "" : state[key];
      const most = key === "dilation_rates" ? state.segment_lengths[i] : Infinity; // a rate is at most its segment
      if (input.dataset.number) {
        if (document.activeElement !== input) input.value = value ?? "";
        input.setAttribute("aria-invalid", value !== null && !(value >= (key === "global_tokens" ? 0 : 1) && value <= most));
        continue;
      }
      if (Number.isFinite(most)) input.max = Math.min(64, most);
      slide(input, key, value);
    }
    for (const check of document.querySelectorAll("[data-flag]")) check.checked = state[check.dataset.flag] === true;
    for (const choice of document.querySelectorAll("[data-choice]")) choice.value = state[choice.dataset.choice];
    for (const button of byId("presets").children) {
      button.setAttribute("aria-pressed", explorer.python(PRESETS[button.dataset.preset].state) === explorer.python(state) &&
        PRESETS[button.dataset.preset].state.num_heads === state.num_heads);
    }
  }

  async function copy() {
    const text = byId("python").textContent;
    try {
      await navigator.clipboard.writeText(text);
      byId("copied").textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(byId("python")); // the browser denies the clipboard: the reader presses the keys
      byId("copied").textContent = "Selected: press Ctrl+C.";
    }
    setTimeout(() => (byId("copied").textContent = ""), 4000);
  }

  // -- tabs --------------------------------------------------------------------------------------------------------------------

  function buildTabs() {
    byId("tabs").innerHTML = VIEWS.map(({ id, title }) =>
      `<button type="button" role="tab" id="tab-${id}" aria-controls="view" data-view="${id}">${escaped(title)}</button>`).join("");
    for (const tab of byId("tabs").children) tab.addEventListener("click", () => set({ view: tab.dataset.view }));
    byId("tabs").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, Home: -VIEWS.length, End: VIEWS.length }[event.key];
      if (!step) return;
      event.preventDefault();
      const at = VIEWS.findIndex(({ id }) => id === app.state.view);
      const next = Math.abs(step) > 1 ? (step > 0 ? VIEWS.length - 1 : 0) : (at + step + VIEWS.length) % VIEWS.length;
      set({ view: VIEWS[next].id });
      byId(`tab-${VIEWS[next].id}`).focus();
    });
  }

  function open(view) {
    current = view;
    const el = byId("view");
    el.innerHTML = view.markup;
    el.setAttribute("aria-labelledby", `tab-${view.id}`);
    for (const tab of byId("tabs").children) {
      const isOpen = tab.dataset.view === view.id;
      tab.setAttribute("aria-selected", isOpen);
      tab.tabIndex = isOpen ? 0 : -1;
    }
    view.build(el, app);
  }

  // -- a frame -----------------------------------------------------------------------------------------------------------------

  function render(isMoving = false) {
    const { state } = app;
    const view = VIEWS.find(({ id }) => id === state.view);
    if (view !== current) open(view);
    fillControls(state);
    const parts = typeof view.parts === "function" ? view.parts(state, isMoving) : view.parts;
    const found = explorer.compute(state, ["boundary", "lost", "pairs", "uncovered", ...parts]);
    byId("message").hidden = !found.message;
    byId("message").textContent = found.message || "";
    for (const id of ["view", "summary", "python"]) byId(id).classList.toggle("stale", Boolean(found.message));
    byId("copy").disabled = Boolean(found.message);
    clearTimeout(written); // browsers reject an address that changes with every frame
    written = setTimeout(() => history.replaceState(null, "", explorer.toAddress(state)), 200);
    byId("views").classList.toggle("empty", Boolean(found.message) && !byId("summary").firstChild);
    if (found.message) return;
    byId("python").textContent = found.python;
    summarise(found);
    fillView(byId("view"), found.state);
    view.render(byId("view"), found, app, isMoving);
  }

  // Fill in the fields of a view, but not the field that has the focus.
  function fillView(el, state) {
    const group = state.num_heads / state.num_kv_heads, heads = Array.from({ length: state.num_heads }, (_, head) => head);
    for (const input of el.querySelectorAll("[data-state]")) {
      const key = input.dataset.state, value = state[key], options = key === "head" ? heads : key === "block_size" ? [...new Set([16, 32, 64, 128, 256, 512, value])] : [];
      const names = options.map((option) => (key === "head" ? `${option}${group > 1 ? ` (kv ${Math.floor(option / group)})` : ""}` : `${option} x ${option}`));
      if (options.length && input.dataset.names !== names.join()) input.innerHTML = names.map((name, i) => `<option value="${options[i]}">${name}</option>`).join("");
      input.dataset.names = names.join();
      if (key === "query" && input.type === "range") input.max = state.seq_len - 1;
      if (document.activeElement !== input || input.type === "range") input.value = value;
    }
  }

  function summarise({ boundary, lost, pairs, state, uncovered }) {
    const losing = lost.flatMap((count, i) => (count ? [`${number(count)} of ${number(state.seq_len)} in ${explorer.pairName(explorer.allBranchesOf(state)[i])}`] : []));
    const group = BigInt(state.num_heads / state.num_kv_heads);
    const entries = [
      ["pairs scored" + (group > 1n ? ", key/value heads" : ""), pairs.total >= 10n ** 12n ? Number(pairs.total).toExponential(3) : number(pairs.total)],
      ["of dense attention", percent(pairs.total, pairs.dense)],
      [`forward, heads of ${state.head_dim}`, flops(4n * BigInt(state.head_dim) * group * pairs.total)],
      ["tokens that no head keeps", uncovered === null ? "not counted" : number(uncovered)],
    ];
    if (state.is_causal) {
      const words = boundary === null ? "crosses every boundary: connected" : `does not all cross token ${number(boundary)}: not connected`;
      entries.push(["causal information", words]);
    }
    if (losing.length) entries.push(["tokens that no head keeps in a branch", losing.join(", ")]);
    byId("summary").innerHTML = entries.map(([name, value]) => `<div><dt>${escaped(name)}</dt><dd>${escaped(value)}</dd></div>`).join("");
  }

  buildControls();
  buildTabs();
  byId("view").addEventListener("input", ({ target: { dataset, value } }) => dataset.state && set({ [dataset.state]: explorer.parseInteger(value) }));
  if (matchMedia("(max-width: 820px)").matches) for (const group of document.querySelectorAll(".group + .group")) group.open = false;
  addEventListener("hashchange", () => set(explorer.fromAddress(location.hash)));
  addEventListener("resize", mark);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", mark);
  render();
  explorer.app = app;
})();
