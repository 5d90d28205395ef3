// The page of `colossalai serve`: a chat, or plain continuation where the model's tokenizer has no chat template.
// What a model says goes into the page as text, never as markup.

import { watch } from "/page/curves.js";
import { ask, events, keepKey, readKey } from "/page/wire.js";

const byId = (id) => document.getElementById(id);
const NARROW = matchMedia("(max-width: 50rem)");
const NEAR_PX = 60; // a reader who is this near to the end is taken along
const SETTINGS = ["temperature", "max-tokens", "seed"];
const ENDS = {
  length: "ended at max tokens",
  timeout: "ended by the server's time limit",
  abort: "ended by the server, which stops",
  content_filter: "replaced: it has words that this server does not say",
};

let models = []; // as /v1/models has them
let isLoading = false; // the models are being asked for
let isRefused = false; // the key is missing or wrong: nothing is asked until there is another one
let running = null; // stops the answer under way
let turns = [];

const chosen = () => models.find((each) => each.id === byId("model").value) || null;
const isChat = () => chosen() !== null && chosen().has_chat_template;

function element(name, kind, text = "") {
  const made = document.createElement(name);
  made.className = kind;
  made.textContent = text;
  return made;
}

function button(text, kind, onClick) {
  const made = element("button", kind, text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

// A question or a prompt, what the model has made of it, and where they are shown.
class Turn {
  constructor(asked) {
    this.asked = asked;
    this.answer = "";
    this.node = element("article", "turn");
    this.shown = element("span", "answer");
    this.shown.append(document.createTextNode(""));
    this.note = element("p", "note");
    this.problem = element("p", "problem");
    this.problem.setAttribute("role", "alert");
    this.actions = element("p", "actions");
    this.actions.append(
      button("Copy", "copy", () => this.copy()),
      button(isChat() ? "Again" : "Continue", "again", () => again(this)),
    );
    const texts = element("div", "texts");
    texts.append(element("span", "asked", asked), this.shown);
    this.node.append(texts, this.note, this.problem, this.actions);
  }

  begin() {
    this.note.textContent = this.problem.textContent = "";
    this.node.setAttribute("aria-busy", "true");
  }

  clear() {
    this.answer = this.shown.firstChild.data = "";
  }

  add(text) {
    follow(() => {
      this.answer += text;
      this.shown.firstChild.appendData(text);
    });
  }

  end(note, problem) {
    follow(() => {
      this.note.textContent = note;
      this.problem.textContent = problem;
      this.node.removeAttribute("aria-busy");
    });
  }

  async copy() {
    const text = isChat() ? this.answer : this.asked + this.answer;
    try {
      await navigator.clipboard.writeText(text);
      tell("copied");
    } catch {
      getSelection().selectAllChildren(this.shown); // only https and loopback may: the reader copies what is selected
      tell("selected; copy it by the keyboard");
    }
  }
}

// Changes the conversation, and keeps its end in sight for a reader who is there.
function follow(change) {
  const log = byId("turns");
  const isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
  change();
  if (isNear) log.scrollTop = log.scrollHeight;
}

function tell(text) {
  byId("status").textContent = text;
}

function number(id) {
  const text = byId(id).value;
  return text === "" ? undefined : Number(text);
}

function bodyFor(turn) {
  const model = chosen();
  const body = {
    model: model.id,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
  };
  if (!isChat()) {
    return { ...body, max_tokens: body.max_tokens || model.max_length, prompt: turn.asked + turn.answer };
  }
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const each of turns.slice(0, turns.indexOf(turn))) {
    if (each.answer) { // a question without an answer has not been part of the chat
      messages.push({ role: "user", content: each.asked }, { role: "assistant", content: each.answer });
    }
  }
  return { ...body, messages: [...messages, { role: "user", content: turn.asked }] };
}

function noteOf(times, usage, finish) {
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} token${usage.completion_tokens === 1 ? "" : "s"}`);
  if (usage && usage.completion_tokens > 1 && times.last > times.first) {
    parts.push(`${(((usage.completion_tokens - 1) * 1000) / (times.last - times.first)).toFixed(1)} tokens/s`);
  }
  if (times.first) parts.push(`first after ${((times.first - times.began) / 1000).toFixed(2)} s`);
  if (ENDS[finish]) parts.push(ENDS[finish]);
  return parts.join(", ");
}

async function read(turn, signal) {
  const times = { began: performance.now(), first: 0, last: 0 };
  const path = isChat() ? "/v1/chat/completions" : "/v1/completions";
  const answer = await ask(path, { body: bodyFor(turn), signal });
  let usage = null;
  let finish = null;
  for await (const chunk of events(answer)) {
    usage = chunk.usage || usage;
    for (const choice of chunk.choices) {
      const text = choice.delta ? choice.delta.content : choice.text;
      finish = choice.finish_reason || finish;
      if (text) {
        times.last = performance.now();
        times.first = times.first || times.last;
        turn.add(text);
      }
    }
  }
  return noteOf(times, usage, finish);
}

async function run(turn) {
  running = new AbortController();
  showRunning();
  turn.begin();
  let note = "";
  let problem = "";
  try {
    note = await read(turn, running.signal);
    tell("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else problem = error.message;
    if (error.status === 401) refuse(error);
  }
  running = null;
  showRunning();
  turn.end(note, problem);
}

function again(turn) {
  if (running !== null || !SETTINGS.every((id) => byId(id).reportValidity())) return;
  if (isChat()) turn.clear();
  run(turn);
}

function send(event) {
  event.preventDefault();
  const text = byId("text").value;
  if (running !== null || chosen() === null || !text.trim()) return;
  const turn = new Turn(text);
  turns.push(turn);
  byId("turns").append(turn.node);
  byId("turns").scrollTop = byId("turns").scrollHeight;
  byId("hint").hidden = true;
  byId("text").value = "";
  run(turn);
}

function stop() {
  if (running !== null) running.abort();
}

function begin() {
  stop();
  turns = [];
  byId("turns").replaceChildren();
  byId("hint").hidden = false;
  byId("text").focus();
}

function showRunning() {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("model").disabled = running !== null || models.length < 2;
  document.body.classList.toggle("running", running !== null);
  if (hadFocus) (running === null ? byId("text") : byId("stop")).focus();
}

function showMode() {
  const model = chosen();
  document.body.classList.toggle("plain", model !== null && !isChat());
  byId("system-field").hidden = !isChat();
  byId("send").disabled = model === null;
  byId("text").placeholder = isChat() ? "A message to the model" : "A text that the model continues";
  if (model === null) return;
  byId("hint").textContent = isChat()
    ? `${model.id} answers here. Enter sends, Shift+Enter begins a new line, Esc stops an answer.`
    : `${model.id} has no chat template: it continues what you write. Enter sends, Shift+Enter begins a new line.`;
}

function refuse(error) {
  isRefused = true;
  byId("key-problem").textContent = error.message;
  byId("settings").open = true;
  byId("key").focus();
}

async function load() {
  isRefused = false;
  isLoading = true;
  byId("key-problem").textContent = "";
  try {
    models = (await (await ask("/v1/models")).json()).data;
  } catch (error) {
    models = [];
    byId("hint").textContent = error.message;
    if (error.status === 401) refuse(error);
  }
  isLoading = false;
  const before = byId("model").value;
  byId("model").replaceChildren(...models.map((each) => new Option(each.id, each.id)));
  if (models.some((each) => each.id === before)) byId("model").value = before;
  showRunning();
  showMode();
}

function heard(error) {
  byId("metrics-problem").textContent = error === null ? "" : error.message;
  // A server that was not there when the page was opened is there now, or has another model.
  if (error === null && models.length === 0 && !isRefused && !isLoading) load();
}

byId("composer").addEventListener("submit", send);
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", begin);
byId("model").addEventListener("change", showMode);
byId("temperature").addEventListener("input", () => {
  byId("temperature-shown").value = Number(byId("temperature").value).toFixed(1);
});
byId("text").addEventListener("keydown", (event) => {
  // Enter also ends the choice of a Chinese or Japanese character, and then sends nothing.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
document.addEventListener("invalid", () => { byId("settings").open = true; }, true);
byId("key").value = readKey();
byId("key").addEventListener("change", () => {
  keepKey(byId("key").value.trim());
  load();
});
if (NARROW.matches) byId("settings").open = byId("metrics").open = false;
load();
watch(heard);
