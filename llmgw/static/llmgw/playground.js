/* The playground's page: what was said, what is asked next, and what its answer cost.

   Whatever comes from a model, an engine or a file is text, and is shown as text. */

import { Gateway, Refusal, refusalOf } from "./gateway.js";
import { asCurl, asPython } from "./snippets.js";
import { events } from "./stream.js";

const at = (id) => document.getElementById(id);
const form = at("ask");
const { origin, key: keyUrl, replica: replicaUrl, models: modelsUrl, imagesBytes } = form.dataset;
const gateway = new Gateway({ origin, keyUrl, csrf: form.elements.csrfmiddlewaretoken.value });

const LOOKS = { ready: "good", loading: "busy", on_demand: "", off: "bad", unavailable: "bad" };
const ROUTES = {
  only: "the only one that is ready",
  prefix: "it has computed most of this prompt already",
  "prefix-miss": "the prompt is new, and goes where its like will go",
  "least-loaded": "the least loaded",
  "round-robin": "its turn",
  session: "where this session goes",
};
const ENDINGS = { length: "cut at max tokens", content_filter: "cut by a filter" };
const LOOK_AGAIN_MS = 3000;

const TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city, now.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  },
];
const SCHEMA = {
  type: "object",
  properties: {
    title: { type: "string" },
    year: { type: "integer" },
    tags: { type: "array", items: { type: "string" }, maxItems: 5 },
  },
  required: ["title", "year", "tags"],
  additionalProperties: false,
};

let models = [];
let talk = []; // messages that were answered, and their answers
let images = []; // {name, url, bytes}
let calls = []; // of the last answer, those whose results are not typed in yet
let results = [];
let running = null; // what stops the request that runs

// --- small pieces -------------------------------------------------------------------------------------------

function piece(name, { text = "", ...fields } = {}, ...inner) {
  const made = Object.assign(document.createElement(name), fields);
  made.append(...(text === "" ? [] : [text]), ...inner);
  return made;
}

function count(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;
}

function tellFault(fault) {
  const lines = [piece("p", { text: fault.message })];
  if (fault.retryAfterS) lines.push(piece("p", { text: `It may be answered ${count(fault.retryAfterS, "second")} from now: send it again then.` }));
  if (["loading", "off", "unavailable", "model_not_found"].includes(fault.code)) {
    const link = piece("a", { href: `${modelsUrl}?q=${encodeURIComponent(at("model").value)}`, text: "Look at the model" });
    lines.push(piece("p", {}, link));
  }
  at("fault").replaceChildren(...lines);
  at("fault").hidden = false;
}

function clearFault() {
  at("fault").hidden = true;
  at("fault").replaceChildren();
}

function tellNow(sentence, part = null) {
  at("now").textContent = sentence;
  at("progress").hidden = part === null;
  if (part !== null) at("progress").value = part;
}

// --- the model ----------------------------------------------------------------------------------------------

function chosen() {
  return models.find((each) => each.id === at("model").value);
}

async function readModels() {
  const select = at("model");
  const asked = new URLSearchParams(location.search).get("model");
  const wanted = select.value || asked;
  try {
    models = (await gateway.models()).filter((each) => !each.alias_of);
  } catch (fault) {
    tellFault(fault);
    return;
  }
  const options = models.map((each) => piece("option", { value: each.id, text: `${each.id} (${each.status.replace("_", " ")})` }));
  const there = [...select.options].map((each) => each.textContent);
  if (options.map((each) => each.textContent).join("\n") !== there.join("\n")) select.replaceChildren(...options);
  const found = models.find((each) => each.id === wanted || each.aliases.includes(wanted));
  if (found) select.value = found.id;
  tellStanding();
}

function tellStanding() {
  const model = chosen();
  const told = [];
  if (!model) {
    const link = piece("a", { href: modelsUrl, text: "the models" });
    told.push("There is no model to chat with. Add one under ", link, ".");
  } else {
    const abilities = Object.keys(model.capabilities).filter((each) => model.capabilities[each]);
    const facts = [
      model.reason,
      model.context_length ? `context of ${model.context_length} tokens` : "",
      model.simulated ? "simulated: its answers mean nothing" : "",
      abilities.length ? `can do ${abilities.join(", ")}` : "",
    ];
    told.push(piece("span", { className: `badge ${LOOKS[model.status] ?? ""}`, text: model.status.replace("_", " ") }));
    told.push(facts.filter(Boolean).map((each) => ` ${each}`).join(";"));
  }
  if (at("standing").textContent !== piece("p", {}, ...told).textContent) at("standing").replaceChildren(...told);
  const sees = Boolean(model?.capabilities.vision);
  at("image").disabled = !sees;
  at("image-help").textContent = sees
    ? `Up to ${megabytes(imagesBytes)} in all, sent within the request.`
    : "This model is not set up for images.";
  showSnippets();
}

async function watch() {
  if (!document.hidden && !running && chosen()?.status !== "ready") await readModels();
  setTimeout(watch, LOOK_AGAIN_MS);
}

// --- the request --------------------------------------------------------------------------------------------

function readJson(id, what) {
  const text = at(id).value.trim();
  const told = at(`${id}-fault`);
  told.textContent = "";
  at(id).removeAttribute("aria-invalid");
  if (!text) return null;
  try {
    const value = JSON.parse(text);
    if (what === "list" ? !Array.isArray(value) : typeof value !== "object" || value === null) throw new Error(`it is no ${what}`);
    return value;
  } catch (fault) {
    told.textContent = `This is no JSON ${what}: ${fault.message}. Correct it, or empty the field.`;
    at(id).setAttribute("aria-invalid", "true");
    return undefined;
  }
}

/* The messages that are sent next; `text` is what the user has typed. */
function nextMessages(text) {
  if (calls.length) return [...results, { role: "tool", tool_call_id: calls[0].id, content: text }];
  if (!images.length) return [{ role: "user", content: text }];
  const parts = images.map((each) => ({ type: "image_url", image_url: { url: each.url } }));
  return [{ role: "user", content: [...(text ? [{ type: "text", text }] : []), ...parts] }];
}

/* null where a field cannot be read; it says so itself. */
function request(next) {
  const tools = readJson("tools", "list");
  const schema = readJson("schema", "object");
  if (tools === undefined || schema === undefined) return null;
  const system = at("system").value.trim();
  const asked = { model: at("model").value, messages: [...(system ? [{ role: "system", content: system }] : []), ...talk, ...next] };
  if (at("temperature").value !== "") asked.temperature = Number(at("temperature").value);
  if (at("max-tokens").value !== "") asked.max_tokens = Number(at("max-tokens").value);
  if (tools) asked.tools = tools;
  if (schema) asked.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  return { ...asked, stream: true, stream_options: { include_usage: true } };
}

function showSnippets() {
  const asked = request(nextMessages(at("text").value.trim() || "Hello?"));
  if (!asked) return;
  at("curl").textContent = asCurl(origin, asked);
  at("python").textContent = asPython(origin, asked);
}

// --- the talk -----------------------------------------------------------------------------------------------

function isAtEnd() {
  const log = at("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function follow(change) {
  const follows = isAtEnd();
  change();
  if (follows) at("log").scrollTop = at("log").scrollHeight;
}

function say(role, heading) {
  const log = at("log");
  log.querySelector(".empty")?.remove();
  const article = piece("article", { className: role }, piece("h3", { text: heading }));
  log.append(article);
  log.scrollTop = log.scrollHeight;
  return article;
}

function sayAsked(messages) {
  const articles = [];
  for (const { role, content } of messages.slice(results.length)) {
    const article = say(role === "tool" ? "user" : role, role === "tool" ? `Result of ${calls[0].function.name}` : "You");
    const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
    for (const part of parts) {
      if (part.type === "text") article.append(piece("p", { className: "words", text: part.text }));
      else article.append(piece("img", { src: part.image_url.url, alt: "an image that was sent" }));
    }
    articles.push(article);
  }
  at("log").scrollTop = at("log").scrollHeight;
  return articles;
}

/* An answer as it grows. */
class Answer {
  constructor(name) {
    this.article = say("assistant", name);
    this.article.setAttribute("aria-busy", "true");
    this.text = "";
    this.calls = [];
    this.usage = null;
    this.ending = "";
    this.firstAt = this.lastAt = 0;
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.ending = choice.finish_reason;
    const { content, tool_calls: called, reasoning_content: older, reasoning = older } = choice.delta ?? {};
    if (!content && !called?.length && !reasoning) return;
    this.lastAt = performance.now();
    this.firstAt ||= this.lastAt;
    follow(() => {
      if (reasoning) this.#reasons(reasoning);
      if (content) this.#says(content);
      for (const part of called ?? []) this.#calls(part);
    });
  }

  #says(content) {
    this.text += content;
    this.words ??= this.article.appendChild(piece("p", { className: "words" }));
    this.words.append(content);
  }

  #reasons(content) {
    if (!this.thoughts) {
      this.thoughts = piece("pre", { tabIndex: 0 });
      this.article.append(piece("details", {}, piece("summary", { text: "Reasoning" }), this.thoughts));
    }
    this.thoughts.append(content);
  }

  #calls({ index = 0, id, function: called = {} }) {
    this.shown ??= [];
    this.calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    this.shown[index] ??= this.article.appendChild(piece("pre", { tabIndex: 0 }));
    const call = this.calls[index];
    if (id) call.id = id;
    call.function.name += called.name ?? "";
    call.function.arguments += called.arguments ?? "";
    this.shown[index].textContent = `${call.function.name}(${call.function.arguments})`;
  }

  get isEmpty() {
    return !this.text && !this.calls.length;
  }

  get message() {
    const said = { role: "assistant", content: this.text || null };
    return this.calls.length ? { ...said, tool_calls: this.calls } : said;
  }

  /* What it cost. `begunAt` is when it was asked for, `note` how it ended where that was not as it should. */
  end(begunAt, note = "") {
    this.article.removeAttribute("aria-busy");
    const figures = [];
    if (this.firstAt) figures.push(`TTFT ${Math.round(this.firstAt - begunAt)} ms`);
    const made = this.usage?.completion_tokens;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    if (made > 1 && seconds > 0) figures.push(`${((made - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      figures.push(`${count(this.usage.prompt_tokens, "token")} asked${cached ? `, ${cached} of them cached` : ""}, ${made ?? 0} answered`);
    }
    if (note || ENDINGS[this.ending]) figures.push(note || ENDINGS[this.ending]);
    const follows = isAtEnd();
    if (figures.length) this.article.append(piece("p", { className: "figures", text: figures.join(" · ") }));
    if (this.served) this.article.append(this.served);
    if (follows) at("log").scrollTop = at("log").scrollHeight;
  }

  /* Which replica answers and why, by the answer's headers. */
  async tellWho(headers, asked) {
    const replica = headers.get("x-llmgw-replica");
    this.served = piece("p", { className: "figures" });
    if (!replica) {
      this.served.textContent = "Which replica it was is not known here: the answer began while its model was loading.";
      return;
    }
    const why = headers.get("x-llmgw-route") ?? "";
    const model = decodeURIComponent(headers.get("x-llmgw-model") ?? "");
    const link = piece("a", { href: replicaUrl.replace(/[0-9a-f-]{36}/, replica), text: replica.slice(0, 8) });
    const where = piece("span");
    const rest = [`: ${ROUTES[why] ?? why}`, ` · ${headers.get("x-llmgw-overhead-ms")} ms in the gateway`];
    if (model && model !== asked) rest.push(` · ${model} stood in for ${asked}`);
    this.served.append("Replica ", link, where, ...rest);
    try {
      const told = await (await fetch(`/api/replicas/${encodeURIComponent(replica)}`)).json();
      if (told.node) where.textContent = ` of ${told.model}/${told.profile} on ${told.node}`;
    } catch {
      // its page says more
    }
  }
}

function tellLoading(comment) {
  const found = /^loading (\w+)(?: (\d+)%)?$/.exec(comment);
  if (!found) tellNow(comment === "waiting" ? "The model is at work." : `The gateway says: ${comment}.`);
  else tellNow(`The model is loading: ${found[1]}${found[2] ? `, ${found[2]} %` : ""}.`, found[2] ? Number(found[2]) : null);
}

async function read(response, answer) {
  let isWhole = false;
  for await (const event of events(response.body)) {
    if (event.comment !== undefined) {
      tellLoading(event.comment);
    } else if (event.data === "[DONE]") {
      isWhole = true;
    } else {
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw refusalOf(chunk.error);
      answer.take(chunk);
      tellNow("The model answers.");
    }
  }
  if (!isWhole) throw new Refusal("The answer ends here unfinished, because the connection was cut: ask again.");
}

async function send() {
  const text = at("text").value.trim();
  if (running || !chosen()) return;
  if (!text && !images.length) {
    at("text").focus();
    return;
  }
  const next = nextMessages(text);
  if (calls.length > 1) {
    sayAsked(next);
    results = next;
    calls = calls.slice(1);
    at("text").value = "";
    askForResult();
    return;
  }
  const asked = request(next);
  if (!asked) {
    document.querySelector("[aria-invalid]").closest("details").open = true;
    document.querySelector("[aria-invalid]").focus();
    return;
  }
  running = new AbortController();
  clearFault();
  at("send").disabled = true;
  at("stop").disabled = false;
  const shown = sayAsked(next);
  const kept = { text: at("text").value, images };
  at("text").value = "";
  images = [];
  showImages();
  tellNow("Asked; no answer yet.");
  const answer = new Answer(asked.model);
  const begunAt = performance.now();
  let note = "";
  try {
    const response = await gateway.chat(asked, running.signal);
    answer.tellWho(response.headers, asked.model);
    await read(response, answer);
    tellNow("");
  } catch (fault) {
    const isStopped = fault.name === "AbortError";
    note = isStopped ? "stopped by you" : "unfinished";
    tellNow(isStopped ? "Stopped." : "");
    if (!isStopped) tellFault(fault instanceof Refusal ? fault : new Refusal(`The answer cannot be read: ${fault.message}`));
  }
  if (answer.isEmpty && note) {
    for (const each of [...shown, answer.article]) each.remove();
    if (!at("text").value) at("text").value = kept.text; // to be sent once more
    images = kept.images;
    showImages();
  } else {
    answer.end(begunAt, note);
    talk = [...talk, ...next, answer.message];
    results = [];
    calls = note ? [] : answer.calls;
    if (note && answer.calls.length) talk.splice(-1, 1, { role: "assistant", content: answer.text || "..." });
  }
  running = null;
  at("send").disabled = false;
  at("stop").disabled = true;
  askForResult();
  await readModels();
}

function askForResult() {
  at("text-label").textContent = calls.length ? `What ${calls[0].function.name} answers (of ${count(calls.length, "call")} to go)` : "Your message";
  at("text").focus();
  showSnippets();
}

function beginAnew() {
  running?.abort();
  talk = [];
  results = [];
  calls = [];
  images = [];
  at("log").replaceChildren(piece("p", { className: "empty", text: "Nothing has been said yet." }));
  at("text").value = "";
  clearFault();
  tellNow("");
  showImages();
  askForResult();
}

// --- images -------------------------------------------------------------------------------------------------

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Refusal(`${file.name} cannot be read: choose another file.`));
    reader.readAsDataURL(file);
  });
}

async function takeImages(files) {
  clearFault();
  try {
    for (const file of files) {
      if (!file.type.startsWith("image/")) throw new Refusal(`${file.name} is no image: choose another file.`);
      const bytes = images.reduce((sum, each) => sum + each.bytes, file.size);
      if (bytes > Number(imagesBytes)) {
        throw new Refusal(`With ${file.name} the images are ${megabytes(bytes)}, and may be ${megabytes(imagesBytes)} in all: choose a smaller one.`);
      }
      images = [...images, { name: file.name, url: await asDataUrl(file), bytes: file.size }];
    }
  } catch (fault) {
    tellFault(fault);
  }
  showImages();
  showSnippets();
}

function showImages() {
  const items = images.map((each) => {
    const button = piece("button", { type: "button", className: "button", text: `Leave out ${each.name}` });
    button.addEventListener("click", () => {
      images = images.filter((other) => other !== each);
      showImages();
      showSnippets();
      at("image").focus();
    });
    return piece("li", {}, piece("img", { src: each.url, alt: each.name }), button);
  });
  at("images").replaceChildren(...items);
}

// --- what is done here --------------------------------------------------------------------------------------

async function copy(id) {
  const text = at(id).textContent;
  try {
    await navigator.clipboard.writeText(text);
    at("copied").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(at(id));
    at("copied").textContent = "It is selected: copy it with the keyboard.";
  }
}

function fillIn(id, value) {
  at(id).value = JSON.stringify(value, null, 2);
  at(id).focus();
  showSnippets();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
form.addEventListener("input", showSnippets);
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("anew").addEventListener("click", beginAnew);
at("model").addEventListener("change", tellStanding);
at("image").addEventListener("change", async ({ target }) => {
  await takeImages([...target.files]);
  target.value = "";
});
at("tools-sample").addEventListener("click", () => fillIn("tools", TOOLS));
at("schema-sample").addEventListener("click", () => fillIn("schema", SCHEMA));
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", () => copy(button.dataset.copies));
}
addEventListener("focus", () => {
  if (!running) readModels();
});

await readModels();
watch();
