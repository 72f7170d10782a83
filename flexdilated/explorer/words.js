// Numbers and heads in words, small pieces of markup, and the colours of the page.
"use strict";

(() => {
  const FORMAT = new Intl.NumberFormat("en");
  const number = (value) => FORMAT.format(value);

  // Three digits or more, with a unit of a power of 1,000.
  function scaled(value, units) {
    let at = 0, rest = Number(value);
    while (at < units.length - 1 && rest >= 999.5) [rest, at] = [rest / 1000, at + 1];
    const digits = rest >= 99.95 || !at ? Math.round(rest).toLocaleString("en") : rest >= 9.995 ? rest.toFixed(1) : rest.toFixed(2);
    return `${digits} ${units[at]}`;
  }

  const flops = (value) => scaled(value, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"]);

  // A share of BigInts or numbers, in per cent.
  function percent(part, whole) {
    const share = (100 * Number(part)) / Number(whole);
    if (!share) return "0 %";
    if (share === 100) return "100 %";
    if (share < 0.01) return `${share.toPrecision(2)} %`;
    return `${share > 99.9 ? Math.floor(share * 100) / 100 : Number(share.toPrecision(3))} %`;
  }

  // A ratio in three digits.
  function times(value) {
    return value < 100 ? value.toFixed(value < 10 ? 2 : 1) : Math.round(value).toLocaleString("en");
  }

  const plural = (count, one, many = `${one}s`) => `${number(count)} ${Number(count) === 1 ? one : many}`;

  // 0-3, or 0, 4, 8: ascending numbers, neighbours as one run.
  function runs(values) {
    const found = [];
    for (const value of values) {
      if (found.length && value === found.at(-1).at(-1) + 1) found.at(-1)[1] = value;
      else found.push([value]);
    }
    const names = found.map((run) => run.join("-"));
    return names.length > 4 ? `${names[0]}, ${names[1]}, … ${names.at(-1)}` : names.join(", ");
  }

  // The query heads of key/value heads; where several share one, the key/value heads too.
  function headNames(list, { num_heads: heads, num_kv_heads: kvHeads }) {
    const group = heads / kvHeads, queries = list.flatMap((kv) => Array.from({ length: group }, (_, i) => kv * group + i));
    return `${queries.length === 1 ? "head" : "heads"} ${runs(queries)}${group > 1 ? ` (kv ${runs(list)})` : ""}`;
  }

  // A branch in short, and in a sentence.
  const shortName = ({ length, rate, window, first }) => (first ? `first ${number(first)}` : window ? `window ${number(window)}` : `w ${number(length)}, r ${rate}`);
  const pairName = ({ length, rate, window, first }) => (first ? `the first ${number(first)}` : window ? `the window of ${number(window)}` : `(${number(length)}, ${rate})`);

  const range = (first, end) => (end - first === 1 ? number(first) : `${number(first)}-${number(end - 1)}`);

  const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

  // A table: header cells, rows of cells, which row is marked.
  function table(caption, header, rows, chosen = -1) {
    const head = header.map((cell) => `<th scope="col">${escaped(cell)}</th>`).join("");
    const body = rows.map((row, i) => `<tr${i === chosen ? ' class="chosen"' : ""}>${row
      .map((cell, j) => (j ? `<td>${escaped(cell)}</td>` : `<th scope="row">${escaped(cell)}</th>`)).join("")}</tr>`);
    return `<div class="scroll" tabindex="0" role="region" aria-label="${escaped(caption)}"><table><caption>${escaped(caption)}</caption>` +
      `<thead><tr>${head}</tr></thead><tbody>${body.join("")}</tbody></table></div>`;
  }

  // -- colours -----------------------------------------------------------------------------------------------------------------

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  let known = null;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (known = null));

  function colors() {
    known ||= {
      ...Object.fromEntries(["paper", "ink", "quiet", "rule", "accent", "mark", "window", "apart", "future"].map((name) => [name, variable(name)])),
      scale: variable("scale").split(" "),
    };
    return known;
  }

  function blend(a, b, share) {
    const part = (i) => Math.round(parseInt(a.slice(i, i + 2), 16) * (1 - share) + parseInt(b.slice(i, i + 2), 16) * share);
    return `#${[1, 3, 5].map((i) => part(i).toString(16).padStart(2, "0")).join("")}`;
  }

  // A colour for each of so many levels above 0, few to many.
  function levels(count) {
    const { scale } = colors();
    if (count <= 1) return [scale[3]];
    return Array.from({ length: count }, (_, i) => {
      const stop = (i * (scale.length - 1)) / (count - 1), low = Math.min(Math.floor(stop), scale.length - 2);
      return blend(scale[low], scale[low + 1], stop - low);
    });
  }

  Object.assign(explorer, { colors, escaped, flops, headNames, levels, number, pairName, percent, plural, range, shortName, table, times });
})();
