/* What was said, as the page shows it, and an answer as it grows: its words, what it cost, and who gave it. */

import { count, piece } from "./pieces.js";

const log = document.getElementById("log");
const replicaUrl = document.getElementById("ask").dataset.replica;

const ROUTES = {
  only: "the only one that is ready",
  prefix: "it has computed most of this prompt already",
  "prefix-miss": "the prompt is new, and goes where its like will go",
  "least-loaded": "the least loaded",
  "round-robin": "its turn",
  session: "where this session goes",
};
const ENDINGS = { length: "cut at max tokens", content_filter: "cut by a filter" };

export function toEnd() {
  log.scrollTop = log.scrollHeight;
}

/* Whoever has scrolled back to read is left there. */
function follow(change) {
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (follows) toEnd();
}

export function sayNothing() {
  log.replaceChildren(piece("p", { className: "empty", text: "Nothing has been said yet." }));
}

export function say(role, heading) {
  log.querySelector(".empty")?.remove();
  const article = piece("article", { className: role }, piece("h3", { text: heading }));
  log.append(article);
  toEnd();
  return article;
}

/* An answer as it grows. */
export class Answer {
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
    follow(() => {
      if (figures.length) this.article.append(piece("p", { className: "figures", text: figures.join(" · ") }));
      if (this.served) this.article.append(this.served);
    });
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
