// How many different integers several arithmetic progressions hold, without listing them.
"use strict";

(() => {
  const { mod } = explorer;

  const BEYOND = 2 ** 50; // no sequence is so long

  // How many different integers progressions hold: { first, rate, begin, end } are those of first + k * rate in [begin, end).
  function countUnion(progressions) {
    const edges = [...new Set(progressions.flatMap(({ begin, end }) => [begin, end]))].sort((a, b) => a - b);
    const ordered = [...progressions].sort((a, b) => a.begin - b.begin);
    let total = 0, next = 0, covering = [];
    for (let i = 0; i + 1 < edges.length; i++) {
      while (next < ordered.length && ordered[next].begin <= edges[i]) covering.push(ordered[next++]);
      covering = covering.filter(({ end }) => end > edges[i]);
      total += countCell(covering.map(({ first, rate }) => [mod(first, rate), rate]), edges[i], edges[i + 1]);
    }
    return total;
  }

  // Integers of [begin, end) in any of the residue classes, by inclusion and exclusion.
  function countCell(classes, begin, end) {
    const needed = classes.filter(
      ([a, r], i) => !classes.some(([b, s], j) => i !== j && r % s === 0 && a % s === b && (r !== s || j < i)),
    );
    const count = (from, residue, modulus, sign) => {
      let total = sign * countClass(residue, modulus, begin, end);
      if (!total) return 0;
      for (let i = from; i < needed.length; i++) {
        const both = intersection(residue, modulus, ...needed[i]);
        if (both) total += count(i + 1, ...both, -sign);
      }
      return total;
    };
    return needed.reduce((sum, [residue, rate], i) => sum + count(i + 1, residue, rate, 1), 0);
  }

  function countClass(residue, modulus, begin, end) {
    if (modulus === Infinity) return begin <= residue && residue < end ? 1 : 0;
    const first = begin + mod(residue - begin, modulus);
    return first < end ? Math.floor((end - 1 - first) / modulus) + 1 : 0;
  }

  // The class of integers in two classes, by the Chinese remainder theorem; null where it holds none of a sequence. A modulus beyond
  // all sequences is infinite: the class is one integer.
  function intersection(a, r, b, s) {
    if (r === Infinity) return a % s === b ? [a, r] : null;
    const [divisor, inverse] = euclid(r, s);
    if ((b - a) % divisor) return null;
    const step = s / divisor;
    const times = Number(((BigInt((b - a) / divisor) * BigInt(inverse)) % BigInt(step) + BigInt(step)) % BigInt(step));
    const residue = a + r * times, modulus = r * step;
    if (modulus <= BEYOND) return [residue, modulus];
    return residue <= BEYOND ? [residue, Infinity] : null;
  }

  // The greatest common divisor of r and s, and u with u r = divisor modulo s.
  function euclid(r, s) {
    let [a, b, u, v] = [r, s, 1, 0];
    while (b) {
      const q = Math.floor(a / b);
      [a, b, u, v] = [b, a - q * b, v, u - q * v];
    }
    return [a, u];
  }

  Object.assign(explorer, { countUnion });
})();
