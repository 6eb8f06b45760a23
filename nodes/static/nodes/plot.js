/* Draws what is told at an address: every `<figure class="plot" data-url="...">` becomes plots.

   The address answers with `{plots: [{name, title, unit, lines: [{name, label, values}]}], note}` and either
   `begins_at`, `step_s` and `count`, for values that are evenly apart in time, or `x: {label, unit, values}`.
   null is a gap. `data-small`: without legends' room, for a corner of a page. `data-plots="one two"`: of all
   that is told, these. `data-every`: seconds until it is asked again, 0 never; a step, unless told.
   A `.spans` list of links `?span=...` in the figure chooses the span, which stays in the page's address.

   Each plot can be walked through by the arrow keys, is read out as it is, and has its values in a table. */

const HEIGHT = { usual: 160, small: 96 };
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [14, 4]];
const LEAST_EVERY_S = 20;
const MOST_EVERY_S = 300;
const SECOND_MS = 1000;

const made = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
};

// --- words ------------------------------------------------------------------------------------------

const FEW = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const MANY = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, notation: "compact" });

/** A value in its unit as people say it, without the unit where the heading has it. */
function told(value, unit) {
    if (value === null || value === undefined) return "-";
    if (unit === "ms") return value >= 1000 ? `${FEW.format(value / 1000)} s` : `${FEW.format(value)} ms`;
    return Math.abs(value) >= 100_000 ? MANY.format(value) : FEW.format(value);
}

const two = (number) => String(number).padStart(2, "0");

/** A moment in UTC, as the other pages tell it. */
function moment(seconds, withDay) {
    const at = new Date(seconds * SECOND_MS);
    const time = `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}`;
    return withDay ? `${at.getUTCFullYear()}-${two(at.getUTCMonth() + 1)}-${two(at.getUTCDate())} ${time}` : time;
}

/** The x axis of what was told: its values, and how one of them is called. */
function axisOf(answer) {
    if (answer.x) {
        const { label, unit, values } = answer.x;
        return { isTime: false, values, label: unit ? `${label}, ${unit}` : label, call: (value) => `${told(value)} ${unit}`.trim() };
    }
    const begins = Date.parse(answer.begins_at) / SECOND_MS;
    const values = Array.from({ length: answer.count }, (_, place) => begins + place * answer.step_s);
    const withDay = answer.step_s * answer.count > 6 * 3600;
    return { isTime: true, values, label: "from, UTC", call: (value) => moment(value, withDay) };
}

// --- one plot ---------------------------------------------------------------------------------------

const isQuiet = (line) => line.values.every((value) => !value);
const isUnknown = (line) => line.values.every((value) => value === null);

/** Where a value has none beside it, and so no line would show it. */
const alone = (values) =>
    values.flatMap((value, at) => (value !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null ? [at] : []));

class Plot {
    constructor(uPlot, figure, told) {
        this.uPlot = uPlot;
        this.figure = figure;
        this.isSmall = "small" in figure.dataset;
        this.place = null;
        this.drawn = made("div", { class: "drawn" });
        this.nothing = made("p", { class: "nothing" }, "Nothing is known of this time.");
        this.lines = made("ul", { class: "lines" });
        this.at = made("p", { class: "at", "aria-live": "polite" });
        this.rows = made("div", { class: "rows", tabindex: "0", role: "region", "aria-label": `${told.title}, as a table` });
        this.details = made("details", {}, made("summary", {}, "As a table"), this.rows);
        this.details.addEventListener("toggle", () => this.fill());
        const unit = made("span", { class: "unit" }, told.unit);
        const parts = [made("h3", {}, told.title, unit), this.nothing, this.drawn, this.lines, this.at, this.details];
        this.element = made("section", { "data-plot": told.name }, ...parts);
        this.drawn.tabIndex = 0;
        this.drawn.setAttribute("role", "application");
        this.drawn.setAttribute("aria-label", `Plot: ${told.title}, ${told.unit}. Arrow keys walk through its values.`);
        this.drawn.addEventListener("keydown", (event) => this.walk(event));
        this.drawn.addEventListener("blur", () => this.leave());
    }

    show(plot, axis) {
        this.plot = plot;
        this.axis = axis;
        const isEmpty = plot.lines.every(isUnknown);
        this.nothing.hidden = !isEmpty;
        for (const part of [this.drawn, this.lines, this.at, this.details]) part.hidden = isEmpty;
        if (isEmpty) {
            this.drop();
            return;
        }
        // A line that is 0 throughout would only hide another one's foot. It is told, and not drawn.
        const kept = plot.lines.map((line, at) => [line, at]).filter(([line, at]) => at === 0 || !isQuiet(line));
        const shape = kept.map(([line, at]) => `${at} ${line.label}`).join();
        const data = [axis.values, ...kept.map(([line]) => line.values)];
        if (this.chart && this.shape === shape) {
            this.chart.setData(data);
        } else {
            this.drop();
            this.shape = shape;
            this.chart = new this.uPlot(this.options(kept), data, this.drawn);
        }
        this.tell();
        this.fill();
    }

    options(kept) {
        const { unit } = this.plot;
        const { isTime, call } = this.axis;
        const style = (name) => () => getComputedStyle(this.figure).getPropertyValue(name).trim();
        const axis = {
            stroke: style("--body-quiet-color"),
            grid: { stroke: style("--plot-grid"), width: 1 },
            ticks: { show: false },
            font: "11px system-ui, sans-serif",
        };
        return {
            width: this.width(),
            height: HEIGHT[this.isSmall ? "small" : "usual"],
            tzDate: (seconds) => this.uPlot.tzDate(new Date(seconds * SECOND_MS), "Etc/UTC"),
            legend: { show: false },
            cursor: { y: false, drag: { x: false, y: false }, sync: { key: this.figure.dataset.url.split("?")[0] } },
            scales: {
                x: { time: isTime },
                y: { range: (chart, least, most) => [0, most > 0 ? most * 1.08 : 1] },
            },
            axes: [
                { ...axis, size: 24, space: 60, values: (chart, splits) => splits.map((at) => this.short(at, call)) },
                { ...axis, size: 56, space: this.isSmall ? 32 : 28, values: (chart, splits) => splits.map((value) => told(value, unit)) },
            ],
            series: [
                {},
                ...kept.map(([line, at]) => ({
                    label: line.label,
                    stroke: style(`--plot-${(at % DASHES.length) + 1}`),
                    width: 2,
                    dash: DASHES[at % DASHES.length],
                    points: isTime ? { show: true, size: 4, filter: (chart, own) => alone(chart.data[own]) } : { show: true, size: 6 },
                    spanGaps: !isTime,
                })),
            ],
            hooks: { setCursor: [(chart) => this.point(chart.cursor.idx)] },
        };
    }

    /** Of a moment, what fits below an axis. */
    short(at, call) {
        if (!this.axis.isTime) return told(at);
        const isMidnight = at % 86_400 === 0;
        return isMidnight ? moment(at, true).slice(5, 10) : moment(at, false);
    }

    width() {
        return Math.max(160, Math.floor(this.element.clientWidth || 320));
    }

    fit() {
        if (this.chart && this.chart.width !== this.width()) {
            this.chart.setSize({ width: this.width(), height: this.chart.height });
        }
    }

    drop() {
        this.chart?.destroy();
        this.chart = null;
        this.place = null;
    }

    point(place) {
        const found = place ?? null;
        if (found === this.place) return;
        this.place = found;
        this.tell();
    }

    /** The values where the cursor is, or else the last that are known. */
    tell() {
        const { unit, lines } = this.plot;
        const items = lines.map((line, at) => {
            const value = this.place === null ? line.values.findLast((each) => each !== null) : line.values[this.place];
            const hue = `--plot-${(at % DASHES.length) + 1}`;
            return made(
                "li",
                at > 0 && isQuiet(line) ? { class: "quiet" } : {},
                swatch(hue, DASHES[at % DASHES.length]),
                made("span", {}, line.label),
                made("span", { class: "value" }, told(value, unit)),
            );
        });
        this.lines.replaceChildren(...items);
        const where = this.place === null ? "" : this.axis.call(this.axis.values[this.place]);
        if (document.activeElement !== this.drawn) {
            this.at.textContent = where;
            return;
        }
        const values = lines.map((line) => `${line.label} ${told(line.values[this.place], unit)}`);
        this.at.textContent = where && `${where}: ${values.join(", ")}`;
    }

    walk(event) {
        const last = this.axis.values.length - 1;
        const from = this.place ?? last + 1;
        const far = Math.max(1, Math.round(last / 10));
        const places = {
            ArrowLeft: from - 1,
            ArrowRight: this.place === null ? 0 : from + 1,
            PageUp: from - far,
            PageDown: from + far,
            Home: 0,
            End: last,
        };
        if (event.key === "Escape") this.leave();
        if (!(event.key in places) || !this.chart) return;
        event.preventDefault();
        const place = Math.min(last, Math.max(0, places[event.key]));
        const left = this.chart.valToPos(this.axis.values[place], "x");
        this.chart.setCursor({ left, top: this.chart.over.clientHeight / 2 }, true, true);
        this.point(place);
    }

    leave() {
        this.chart?.setCursor({ left: -10, top: -10 }, true, true);
        this.point(null);
    }

    /** The table, once somebody looks. */
    fill() {
        if (!this.details.open) return;
        const { lines, unit } = this.plot;
        const head = made("tr", {}, ...[this.axis.label, ...lines.map((line) => line.label)].map((word) => made("th", { scope: "col" }, word)));
        const rows = this.axis.values.map((at, place) =>
            made(
                "tr",
                {},
                made("th", { scope: "row" }, this.axis.call(at)),
                ...lines.map((line) => made("td", {}, told(line.values[place], unit))),
            ),
        );
        if (this.axis.isTime) rows.reverse(); // what was last is looked for first
        this.rows.replaceChildren(made("table", {}, made("thead", {}, head), made("tbody", {}, ...rows)));
    }
}

const SVG = "http://www.w3.org/2000/svg";

function swatch(hue, dash) {
    const svg = document.createElementNS(SVG, "svg");
    const line = document.createElementNS(SVG, "line");
    for (const [name, value] of Object.entries({ width: 22, height: 8, "aria-hidden": "true" })) svg.setAttribute(name, value);
    const ends = { x1: 0, x2: 22, y1: 4, y2: 4, "stroke-dasharray": dash.join(" ") };
    for (const [name, value] of Object.entries(ends)) line.setAttribute(name, value);
    line.style.setProperty("--hue", `var(${hue})`);
    svg.append(line);
    return svg;
}

// --- a figure ---------------------------------------------------------------------------------------

class Figure {
    constructor(uPlot, element) {
        this.uPlot = uPlot;
        this.element = element;
        this.plots = new Map();
        this.status = made("p", { class: "plot-status", role: "status" });
        this.grid = made("div", { class: "plots" });
        element.append(this.status, this.grid);
        this.spans = [...element.querySelectorAll(".spans a")];
        for (const link of this.spans) link.addEventListener("click", (event) => this.choose(event, link));
        this.mark();
        new ResizeObserver(() => this.each((plot) => plot.fit())).observe(this.grid);
    }

    each(act) {
        for (const plot of this.plots.values()) act(plot);
    }

    get span() {
        return new URLSearchParams(location.search).get("span");
    }

    get address() {
        const address = new URL(this.element.dataset.url, location.href);
        if (this.spans.length && this.isKept(this.span)) address.searchParams.set("span", this.span);
        return address;
    }

    isKept(span) {
        return this.spans.some((link) => new URL(link.href).searchParams.get("span") === span);
    }

    choose(event, link) {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault(); // a form on this page may hold what was typed
        const address = new URL(location.href);
        address.searchParams.set("span", new URL(link.href).searchParams.get("span"));
        history.replaceState(history.state, "", address);
        this.mark();
        this.ask();
    }

    mark() {
        const chosen = this.isKept(this.span) ? this.span : null;
        this.spans.forEach((link, at) => {
            const own = new URL(link.href).searchParams.get("span");
            if (chosen === null ? at === 0 : own === chosen) link.setAttribute("aria-current", "true");
            else link.removeAttribute("aria-current");
        });
    }

    say(words, isFailure = false) {
        this.status.classList.toggle("failed", isFailure);
        if (!isFailure) {
            if (this.status.textContent !== words) this.status.textContent = words;
            return;
        }
        const again = made("button", { type: "button" }, "Try again");
        again.addEventListener("click", () => this.ask());
        this.status.replaceChildren(words, again);
    }

    async ask() {
        clearTimeout(this.timer);
        this.asked?.abort();
        const asked = (this.asked = new AbortController());
        if (!this.plots.size) this.say("Loading ...");
        this.element.setAttribute("aria-busy", "true");
        let stepS = 60;
        try {
            const signals = AbortSignal.any([asked.signal, AbortSignal.timeout(20 * SECOND_MS)]);
            const answer = await fetch(this.address, { headers: { Accept: "application/json" }, cache: "no-store", signal: signals });
            if (!answer.ok) throw new Error(await refusal(answer));
            const found = await answer.json();
            stepS = found.step_s || 0;
            this.show(found);
        } catch (problem) {
            if (asked.signal.aborted) return;
            const why = problem.name === "TimeoutError" || problem instanceof TypeError ? "the server cannot be reached" : problem.message;
            this.say(this.plots.size ? `Not up to date: ${why}.` : `Nothing can be shown: ${why}.`, true);
        }
        this.element.removeAttribute("aria-busy");
        const { every } = this.element.dataset;
        const everyS = every === undefined ? Math.min(MOST_EVERY_S, Math.max(LEAST_EVERY_S, stepS)) : Number(every);
        if (everyS && stepS) this.timer = setTimeout(() => this.again(), everyS * SECOND_MS);
    }

    /** Nobody looks at a page that is hidden. */
    again() {
        if (!document.hidden) {
            this.ask();
            return;
        }
        const come = () => {
            document.removeEventListener("visibilitychange", come);
            this.ask();
        };
        document.addEventListener("visibilitychange", come);
    }

    show(found) {
        const chosen = this.element.dataset.plots?.split(" ");
        const plots = found.plots.filter((plot) => !chosen || chosen.includes(plot.name));
        const axis = axisOf(found);
        const names = new Set(plots.map((plot) => plot.name));
        for (const [name, plot] of this.plots) {
            if (names.has(name)) continue;
            plot.drop();
            plot.element.remove();
            this.plots.delete(name);
        }
        for (const plot of plots) {
            if (!this.plots.has(plot.name)) {
                const own = new Plot(this.uPlot, this.element, plot);
                this.plots.set(plot.name, own);
                this.grid.append(own.element);
            }
            this.plots.get(plot.name).show(plot, axis);
        }
        this.say(plots.length ? found.note || "" : found.note || "There is nothing to show.");
    }
}

async function refusal(answer) {
    try {
        return (await answer.json()).errors[0].sentence.replace(/\.$/, "");
    } catch {
        return `the server answers ${answer.status}`;
    }
}

// --- the page ---------------------------------------------------------------------------------------

const elements = [...document.querySelectorAll("figure.plot[data-url]")];
if (elements.length) {
    const { default: uPlot } = await import("./vendor/uPlot.esm.js");
    const figures = elements.map((element) => new Figure(uPlot, element));
    for (const figure of figures) figure.ask();
    const redraw = () => figures.forEach((figure) => figure.each((plot) => plot.chart?.redraw(false)));
    new MutationObserver(redraw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
