// How a token is drawn: softmax(logits / temperature), and numbers that a seed determines.

/** xoshiro128** 1.1 (Blackman and Vigna, 2018), its four words from the seed by MurmurHash3's 32-bit finaliser. */
export class Random {
  /** seed: a whole number in [0, 2^32) */
  constructor(seed) {
    this.words = Uint32Array.from([1, 2, 3, 4], (i) => mixed(seed + Math.imul(i, 0x9e3779b9)));
  }

  /** A whole number in [0, 2^32). */
  next() {
    const s = this.words;
    const result = Math.imul(rotated(Math.imul(s[1], 5), 7), 9) >>> 0;
    const t = s[1] << 9;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotated(s[3], 11);
    return result;
  }
}

const rotated = (x, k) => (x << k) | (x >>> (32 - k));

function mixed(x) {
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) >>> 0;
}

/**
 * The next token: the likeliest (the first of equal ones) at temperature 0, else the first whose cumulative probability
 * is above a number in [0, 1). Throws Error where a logit is not finite.
 */
export function draw(logits, temperature, random) {
  let best = 0;
  for (let i = 0; i < logits.length; i++) {
    if (!Number.isFinite(logits[i])) throw new Error("The model's logits are not finite, so that no token can be drawn.");
    if (logits[i] > logits[best]) best = i;
  }
  if (temperature === 0) return best;
  const weights = Float64Array.from(logits, (z) => Math.exp((z - logits[best]) / temperature));
  let left = (random.next() / 2 ** 32) * weights.reduce((sum, weight) => sum + weight, 0);
  for (let i = 0; i < weights.length; i++) {
    left -= weights[i];
    if (left < 0) return i;
  }
  return best; // where rounding has left a remainder
}
