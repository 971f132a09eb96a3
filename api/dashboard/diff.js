// Which words of two short texts differ. Plain data; no page.
//
//   differing("3rd of May.", "4th of May.")   →  [[["3rd", true], [" of May.", false]], [["4th", true], [" of May.", false]]]

const WORDS = /<\|[^|<>]*\|>|[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu;

export function differing(left, right) {
  const a = left.match(WORDS) ?? [];
  const b = right.match(WORDS) ?? [];
  const common = longestCommon(a, b);
  const inA = new Set(common.map(([i]) => i));
  const inB = new Set(common.map(([, j]) => j));
  // Both texts are cut off somewhere: what only one has behind the last word they share need not differ.
  const [lastA, lastB] = common.at(-1) ?? [Infinity, Infinity];
  return [joined(a, (i) => !inA.has(i) && i < lastA), joined(b, (j) => !inB.has(j) && j < lastB)];
}

function joined(words, differs) {
  const parts = [];
  words.forEach((word, i) => {
    const isOther = differs(i);
    if (parts.length && parts.at(-1)[1] === isOther) parts.at(-1)[0] += word;
    else parts.push([word, isOther]);
  });
  return parts;
}

// Pairs of indices, by the table of lengths that everybody fills; texts are a few words long.
function longestCommon(a, b) {
  const lengths = Array.from({ length: a.length + 1 }, () => new Array(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i][j] = a[i] === b[j] ? 1 + lengths[i + 1][j + 1] : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  const pairs = [];
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) pairs.push([i++, j++]);
    else if (lengths[i + 1][j] >= lengths[i][j + 1]) i += 1;
    else j += 1;
  }
  return pairs;
}
