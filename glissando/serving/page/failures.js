// What went wrong, as a sentence, and the form for a key.

import { Failure, hasKey, setKey } from "./client.js";

const $ = (id) => document.getElementById(id);
let waiting = null; // what is done once there is a key that the server takes

/** Show what went wrong; `again` is done once there is a key, where that is what was missing. */
export function tell(error, again = null) {
  if (!(error instanceof Failure)) {
    show(`This page has a defect: ${error.message}. Reload it.`);
    throw error;
  }
  if (error.status === 401) return askForKey(again);
  const field = error.param && $(error.param);
  field?.setAttribute("aria-invalid", "true");
  const fold = field?.closest("details");
  if (fold) fold.open = true;
  show(error.sentence);
}

export function show(message) {
  $("error").textContent = message;
  $("error").hidden = false;
  $("error").scrollIntoView({ block: "nearest" }); // on a phone it stands below the fold
}

export function hush() {
  $("error").hidden = true;
  for (const field of document.querySelectorAll("[aria-invalid=true]")) field.setAttribute("aria-invalid", "false");
}

function askForKey(again) {
  const refused = hasKey() && !$("key-form").hidden;
  show(refused ? "The server does not take this key. Try another." : "This server asks for a key. Type it above.");
  waiting = again;
  $("key-form").hidden = false;
  $("key").focus();
}

/** `meet` asks the server for its models, which shows whether it takes the key. */
export function connectKey(meet) {
  $("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const again = waiting;
    setKey($("key").value.trim());
    hush();
    await meet();
    if (!$("error").hidden) return;
    $("key-form").hidden = true;
    $("prompt").focus();
    again?.();
  });
}
