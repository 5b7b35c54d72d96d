// Words for a model and the ends of its dials, of the playground and of an exported page.

const POLES = { mood: ["sad", "happy"], speech: ["quiet", "talkative"] };

const DEPTHS = { discrete: "ordinary layers", tied: "one block, applied repeatedly", flow: "depth is an ODE" };

/** "attention over time, depth is an ODE". */
export const axes = (mixers, depth) => `${mixers.join(" and ")} over time, ${DEPTHS[depth] ?? `${depth} depth`}`;

/** The words for a dial at -1 and at +1. */
export const poles = (name) => POLES[name] ?? ["−1", "+1"];

/** "happy 0.6", "sad 1", "mood 0": where a dial stands. */
export function position(name, value) {
  if (value === 0 || !POLES[name]) return `${name} ${value}`;
  return `${POLES[name][value < 0 ? 0 : 1]} ${Math.abs(value)}`;
}
