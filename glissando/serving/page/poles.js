// Words for the ends of dials, of the playground and of an exported page.

const POLES = { mood: ["sad", "happy"], speech: ["quiet", "talkative"] };

/** The words for a dial at -1 and at +1. */
export const poles = (name) => POLES[name] ?? ["−1", "+1"];

/** "happy 0.6", "sad 1", "mood 0": where a dial stands. */
export function position(name, value) {
  if (value === 0 || !POLES[name]) return `${name} ${value}`;
  return `${POLES[name][value < 0 ? 0 : 1]} ${Math.abs(value)}`;
}
