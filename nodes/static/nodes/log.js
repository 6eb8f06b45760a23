/* Shows an engine's log as it is written, in every `<section data-log="address">`: streamed while the page can be
   seen, with the last lines alone kept, and a pause for reading. A link with `data-attempt` shows that process's. */

const LINES = 2_000;
const AGAIN_MS = 5_000;

class Log {
    constructor(section) {
        this.address = section.dataset.log;
        this.text = section.querySelector("pre");
        this.state = section.querySelector("[data-state]");
        this.pause = section.querySelector("button[data-pause]");
        this.pause.hidden = false;
        this.isPaused = false;
        this.isFollowing = true; // whether the end is what is looked at
        this.lines = [];
        this.rest = "";
        this.query = "";
        this.running = null;
        this.pause.addEventListener("click", () => this.toggle());
        this.text.addEventListener("scroll", () => {
            this.isFollowing = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 8;
        });
        document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
        document.addEventListener("click", (event) => {
            const link = event.target.closest("a[data-attempt]");
            if (!link) return;
            event.preventDefault();
            this.choose(new URL(link.href).search.slice(1), link.dataset.attempt);
            section.scrollIntoView({ block: "nearest" });
        });
        if (!document.hidden) this.start();
    }

    say(words) {
        this.state.textContent = words;
    }

    choose(query, name) {
        this.stop();
        this.query = query;
        this.of = name;
        if (this.isPaused) this.toggle();
        else this.start();
    }

    toggle() {
        this.isPaused = !this.isPaused;
        this.pause.textContent = this.isPaused ? "Go on" : "Pause";
        if (this.isPaused) {
            this.stop();
            this.say("Paused.");
        } else {
            this.start();
        }
    }

    stop() {
        clearTimeout(this.timer);
        if (this.running) this.running.abort();
        this.running = null;
    }

    async start() {
        if (this.running || this.isPaused) return;
        const running = (this.running = new AbortController());
        let says = "Nothing more is being written.";
        try {
            const answer = await fetch(`${this.address}?tail=200&follow=1&${this.query}`, { signal: running.signal });
            if (!answer.ok) throw new Error(await refusalOf(answer));
            const of = this.of ? ` of ${this.of}` : "";
            this.say(`Live${of}.`);
            this.lines = [];
            this.rest = "";
            this.show("");
            const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
            for (let piece = await reader.read(); !piece.done; piece = await reader.read()) this.show(piece.value);
        } catch (problem) {
            if (running.signal.aborted) return;
            says = problem instanceof TypeError ? "Connection lost." : problem.message;
        }
        if (this.running !== running) return;
        this.running = null;
        this.say(`${says} Looked at again soon.`);
        this.timer = setTimeout(() => this.start(), AGAIN_MS);
    }

    show(piece) {
        const pieces = (this.rest + piece).split("\n");
        this.rest = pieces.pop();
        this.lines.push(...pieces);
        if (this.lines.length > LINES) this.lines = this.lines.slice(-LINES);
        const told = this.rest ? [...this.lines, this.rest] : this.lines;
        this.text.textContent = told.join("\n") || "Nothing yet.";
        if (this.isFollowing) this.text.scrollTop = this.text.scrollHeight;
    }
}

async function refusalOf(answer) {
    try {
        return (await answer.json()).errors[0].sentence;
    } catch {
        return `The server answers ${answer.status}.`;
    }
}

for (const section of document.querySelectorAll("[data-log]")) new Log(section);
