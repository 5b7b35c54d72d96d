// Text to ids and back: bytes, or byte-level BPE (Radford et al., 2019) from the file of Hugging Face's `tokenizers`.

/** kind: as export.json names it; spec: what tokenizer.json holds. */
export const tokenizerOf = (kind, spec) => (kind === "bytes" ? new Bytes() : new BytePairs(spec));

/** An id is a byte. */
class Bytes {
  encode(text) {
    return [...new TextEncoder().encode(text)];
  }

  bytes(id) {
    return [id];
  }
}

// How GPT-2 cuts text before any merge. White space is Unicode's: JavaScript's own \s differs from it by two characters.
const WORDS =
  /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

class BytePairs {
  constructor(spec) {
    const { vocab, merges } = spec.model;
    this.ids = new Map(Object.entries(vocab));
    this.rank = new Map(merges.map((pair, rank) => [Array.isArray(pair) ? pair.join(" ") : pair, rank]));
    this.added = new Map(spec.added_tokens.map(({ content, id }) => [content, id]));
    this.pieces = new Map([...this.ids].map(([token, id]) => [id, bytesOf(token)]));
    for (const [token, id] of this.added) this.pieces.set(id, bytesOf(token));
    this.known = new Map();
    const longest = [...this.added.keys()].sort((a, b) => b.length - a.length).map(escaped);
    this.special = longest.length ? new RegExp(`(${longest.join("|")})`, "u") : null;
  }

  encode(text) {
    const parts = this.special ? text.split(this.special) : [text];
    return parts.flatMap((part) => (this.added.has(part) ? [this.added.get(part)] : this.plain(part)));
  }

  plain(text) {
    return (text.match(WORDS) ?? []).flatMap((word) => {
      if (!this.known.has(word)) this.known.set(word, this.merged(word));
      return this.known.get(word);
    });
  }

  /** The ids of a word: of all neighbours the pair that was merged first in training is merged, until none is left. */
  merged(word) {
    const parts = [...new TextEncoder().encode(word)].map((byte) => STAND_INS[byte]);
    for (;;) {
      let best = Infinity;
      let at = -1;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.rank.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) return parts.map((part) => this.ids.get(part));
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  bytes(id) {
    return this.pieces.get(id) ?? [];
  }
}

const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");

// The printable characters that stand for the 256 bytes.
const STAND_INS = (() => {
  const printable = (b) => (b >= 33 && b < 127) || (b >= 161 && b < 173) || b >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(printable(byte) ? byte : next++));
})();
const BYTE_OF = new Map(STAND_INS.map((character, byte) => [character, byte]));

/** One with a foreign character stands for itself. */
function bytesOf(token) {
  const bytes = [...token].map((character) => BYTE_OF.get(character));
  return bytes.includes(undefined) ? [...new TextEncoder().encode(token)] : bytes;
}
