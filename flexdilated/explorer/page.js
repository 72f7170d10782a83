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

  // -- sliders of sizes: eight steps per doubling, whole numbers ---------------------------------------------------------------

  const sizeAt = (step) => Math.round(2 ** Math.floor(step / SIZES) * (1 + (step % SIZES) / SIZES));
  const stepOf = (size) => {
    if (typeof size !== "number" || size < 1) return 0;
    const octave = Math.floor(Math.log2(size));
    return SIZES * octave + Math.floor((size / 2 ** octave - 1) * SIZES);
  };
  const SLIDERS = {
    window: { from: (step) => (step < 0 ? null : sizeAt(step)), to: stepOf }, seq_len: { from: sizeAt, to: stepOf }, num_heads: { from: Number, to: Number }, num_kv_heads: { from: Number, to: Number },
  };

  function slide(slider, value, to = (x) => x) {
    slider.value = typeof value === "number" ? to(value) : slider.min;
    slider.setAttribute("aria-valuetext", typeof value === "number" ? number(value) : String(value));
  }

  const write = (input, value) => {
    if (document.activeElement !== input) input.value = value;
  };

  // -- branches ----------------------------------------------------------------------------------------------------------------

  function branchRow(i) {
    const field = (name, symbol, label, last) => `<label for="${name}${i}">${symbol}</label>
      <input id="${name}${i}" inputmode="numeric" aria-label="${label} of branch ${i + 1}">
      <input type="range" min="${name === "r" ? 1 : 0}" max="${last}" aria-label="${label} of branch ${i + 1}, slider">`;
    return `<div class="branch" role="group" aria-label="Branch ${i + 1}">${field("w", "w", "Segment length", 160)}
      <button type="button" aria-label="Remove branch ${i + 1}">&times;</button>${field("r", "r", "Dilation rate", 64)}</div>`;
  }

  function setBranch(key, i, value) {
    const values = [...app.state[key]];
    values[i] = value;
    set({ [key]: values });
  }

  function buildBranches(count) {
    const box = byId("branches");
    box.innerHTML = Array.from({ length: count }, (_, i) => branchRow(i)).join("");
    box.dataset.count = count;
    box.querySelectorAll(".branch").forEach((row, i) => {
      const [w, wSlider, r, rSlider] = row.querySelectorAll("input");
      w.addEventListener("input", () => setBranch("segment_lengths", i, explorer.parseInteger(w.value)));
      r.addEventListener("input", () => setBranch("dilation_rates", i, explorer.parseInteger(r.value)));
      wSlider.addEventListener("input", () => setBranch("segment_lengths", i, sizeAt(Number(wSlider.value))));
      rSlider.addEventListener("input", () => setBranch("dilation_rates", i, Number(rSlider.value)));
      row.querySelector("button").addEventListener("click", () => {
        const without = (values) => values.filter((_, j) => j !== i);
        set({ segment_lengths: without(app.state.segment_lengths), dilation_rates: without(app.state.dilation_rates) });
        byId("add").focus();
      });
    });
  }

  function addBranch() {
    const { segment_lengths: lengths, dilation_rates: rates } = app.state;
    const twice = (value, most) => (typeof value === "number" && value >= 1 ? Math.min(2 * value, most) : 1);
    set({
      segment_lengths: [...lengths, twice(lengths.at(-1) ?? 8, LIMITS.segment_length)],
      dilation_rates: [...rates, lengths.length ? twice(rates.at(-1), 64) : 1],
    });
  }

  // -- controls ----------------------------------------------------------------------------------------------------------------

  function buildControls() {
    byId("presets").innerHTML = Object.entries(PRESETS)
      .map(([key, { title }]) => `<button type="button" data-preset="${key}">${escaped(title)}</button>`).join("");
    for (const button of byId("presets").children) {
      button.addEventListener("click", () => set({ ...structuredClone(PRESETS[button.dataset.preset].state) }));
    }
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
    byId("add").addEventListener("click", addBranch);
    for (const input of document.querySelectorAll("[data-number]")) {
      input.addEventListener("input", () => setNumber(input.dataset.number, numberIn(input)));
    }
    for (const slider of document.querySelectorAll("[data-slider]")) {
      slider.addEventListener("input", () => setNumber(slider.dataset.slider, SLIDERS[slider.dataset.slider].from(Number(slider.value))));
    }
    for (const box of document.querySelectorAll("[data-flag]")) box.addEventListener("change", () => set({ [box.dataset.flag]: box.checked }));
    for (const choice of document.querySelectorAll("[data-choice]")) {
      choice.addEventListener("change", () => set({ [choice.dataset.choice]: choice.value }));
    }
    byId("copy").addEventListener("click", copy);
  }

  // An empty field of the window is none.
  const numberIn = ({ dataset, value }) => (dataset.number === "window" && !value.trim() ? null : explorer.parseInteger(value));

  // Key/value heads follow the query heads as long as both are the same.
  function setNumber(key, value) {
    const follows = key === "num_heads" && app.state.num_kv_heads === app.state.num_heads;
    set({ [key]: value, ...(follows ? { num_kv_heads: value } : {}) });
  }

  function fillControls(state) {
    const count = Math.max(state.segment_lengths.length, state.dilation_rates.length);
    if (byId("branches").dataset.count !== String(count)) buildBranches(count);
    byId("branches").querySelectorAll(".branch").forEach((row, i) => {
      const [w, wSlider, r, rSlider] = row.querySelectorAll("input");
      const length = state.segment_lengths[i] ?? "", rate = state.dilation_rates[i] ?? "";
      write(w, length);
      write(r, rate);
      slide(wSlider, length, stepOf);
      if (typeof length === "number") rSlider.max = Math.min(64, length); // a rate is at most its segment
      slide(rSlider, rate);
      for (const [input, isWrong] of [[w, !(length >= 1)], [r, !(rate >= 1 && rate <= length)]]) input.setAttribute("aria-invalid", isWrong);
    });
    for (const input of document.querySelectorAll("[data-number]")) {
      const value = state[input.dataset.number];
      write(input, value ?? "");
      input.setAttribute("aria-invalid", value !== null && !(value >= (input.dataset.number === "global_tokens" ? 0 : 1)));
    }
    for (const slider of document.querySelectorAll("[data-slider]")) slide(slider, state[slider.dataset.slider] ?? "none", SLIDERS[slider.dataset.slider].to);
    for (const box of document.querySelectorAll("[data-flag]")) box.checked = state[box.dataset.flag] === true;
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
    for (const input of el.querySelectorAll("[data-state]")) {
      const parse = () => explorer.parseInteger(input.value);
      input.addEventListener(input.tagName === "SELECT" ? "change" : "input", () => set({ [input.dataset.state]: parse() }));
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
    const found = explorer.compute(state, ["boundary", "pairs", "uncovered", ...parts]);
    byId("message").hidden = !found.message;
    byId("message").textContent = found.message || "";
    for (const id of ["view", "summary", "python"]) byId(id).classList.toggle("stale", Boolean(found.message));
    byId("copy").disabled = Boolean(found.message);
    clearTimeout(written); // browsers refuse an address that changes with every frame
    written = setTimeout(() => history.replaceState(null, "", explorer.toAddress(state)), 200);
    byId("views").classList.toggle("empty", Boolean(found.message) && !byId("summary").firstChild);
    if (found.message) return;
    byId("python").textContent = found.python;
    summarise(found);
    view.render(byId("view"), found, app, isMoving);
  }

  function summarise({ boundary, pairs, state, uncovered }) {
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
    byId("summary").innerHTML = entries.map(([name, value]) => `<div><dt>${escaped(name)}</dt><dd>${escaped(value)}</dd></div>`).join("");
  }

  buildControls();
  buildTabs();
  if (matchMedia("(max-width: 820px)").matches) for (const group of document.querySelectorAll(".group")) group.open = false;
  addEventListener("hashchange", () => set(explorer.fromAddress(location.hash)));
  addEventListener("resize", mark);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", mark);
  render();
  explorer.app = app;
  explorer.render = render;
})();
