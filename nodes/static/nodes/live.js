/* Keeps the parts of a page that are marked `data-live="name"` as they would be if the page were loaded anew.

   The page itself is asked for again while it can be seen, and only what differs is replaced: what has the
   focus, what is selected, which details are open and what was ticked stay as they are. A part marked
   `data-kept` belongs to another script. `data-every` on a part: seconds between two looks, where 2 are too few.

   `<details data-from="address">` hold a link to another page. Once they are open, what that page keeps live stands
   in their `<div>` instead, and follows what happens there for as long as they are. */

const EVERY_S = 2;
const PATIENCE = 4; // a server that answers slowly is asked that much less often
const PATIENCE_BESIDE = 20; // and for what stands beside a page, less often again
const SPOKEN_EVERY_MS = 10_000;

const parts = () => [...document.querySelectorAll("[data-live]")];
const nameOf = (part) => part.dataset.live;

// --- what differs -----------------------------------------------------------------------------------

/** By what a node is known again among its siblings. */
function keyOf(node) {
    if (node.nodeType !== Node.ELEMENT_NODE) return null;
    if (node.id) return `id ${node.id}`;
    if (node.dataset.key) return `key ${node.dataset.key}`;
    if (node.localName !== "tr") return null;
    const ticked = node.querySelector("input.action-select");
    const link = node.querySelector("a[href]");
    return ticked ? `row ${ticked.value}` : link ? `link ${link.getAttribute("href")}` : null;
}

const isAlike = (one, other) =>
    one.nodeType === other.nodeType && one.nodeName === other.nodeName && keyOf(one) === keyOf(other);

/** Whether details are open, and which rows are ticked, is for whoever looks at them. */
const isTheirs = (element, name) =>
    (element.localName === "details" && name === "open") || (element.localName === "tr" && name === "class");

function follow(old, now) {
    if (old.isEqualNode(now)) return;
    if (old.nodeType !== Node.ELEMENT_NODE) {
        if (old.nodeValue !== now.nodeValue) old.nodeValue = now.nodeValue;
        return;
    }
    // What people type in or tick, and what another script writes, is theirs.
    if (old.hasAttribute("data-kept") || ["input", "select", "textarea"].includes(old.localName)) return;
    for (const { name } of [...old.attributes]) {
        if (!now.hasAttribute(name) && !isTheirs(old, name)) old.removeAttribute(name);
    }
    for (const { name, value } of now.attributes) {
        if (!isTheirs(old, name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    followChildren(old, now);
}

function followChildren(old, now) {
    const known = new Map();
    for (const child of old.childNodes) {
        const key = keyOf(child);
        if (key !== null && !known.has(key)) known.set(key, child);
    }
    const kept = new Set([...now.childNodes].map(keyOf));
    for (const [key, child] of known) {
        if (!kept.has(key)) child.remove();
    }
    let next = old.firstChild;
    for (const wanted of [...now.childNodes]) {
        const key = keyOf(wanted);
        let found = key === null ? null : known.get(key);
        if (key === null && next !== null && isAlike(next, wanted)) found = next;
        known.delete(key);
        if (found && isAlike(found, wanted)) {
            if (found === next) next = next.nextSibling;
            else old.insertBefore(found, next);
            follow(found, wanted);
        } else {
            old.insertBefore(document.importNode(wanted, true), next);
        }
    }
    while (next !== null) {
        const over = next;
        next = next.nextSibling;
        over.remove();
    }
}

// --- what is said of it -----------------------------------------------------------------------------

/** Badges word for word, the rest without its numbers: that something is a second older is no news. */
function newsOf(part) {
    const badges = [...part.querySelectorAll(".badge")].map((badge) => badge.textContent);
    return `${badges.join()} ${part.textContent.replaceAll(/\d+(\.\d+)?( (s|min|h|d)\b)?/g, "").replaceAll(/\s+/g, " ")}`;
}

function calledBy(part) {
    const heading = part.querySelector("h2, h3, caption");
    return part.dataset.called || (heading ? heading.textContent.trim() : nameOf(part));
}

const status = document.createElement("p");
status.className = "live-status";
const spoken = document.createElement("p");
spoken.className = "visually-hidden";
spoken.setAttribute("role", "status");
let spokenAt = -SPOKEN_EVERY_MS;
let unspoken = new Set();

function speak() {
    if (!unspoken.size || performance.now() - spokenAt < SPOKEN_EVERY_MS) return;
    spoken.textContent = `Changed: ${[...unspoken].join(", ")}.`;
    spokenAt = performance.now();
    unspoken = new Set();
}

let seenAt = performance.now();
let trouble = "";

function tell() {
    const age = Math.floor((performance.now() - seenAt) / 1000);
    const words = trouble ? `Last update ${age} s ago; ${trouble}` : age > 3 * EVERY_S ? `Last update ${age} s ago` : "Live";
    status.classList.toggle("lost", trouble !== "");
    if (status.textContent !== words) status.textContent = words;
}

function fail(says) {
    if (trouble !== says) spoken.textContent = `This page is not up to date: ${says}.`;
    trouble = says;
    tell();
}

// --- looking ----------------------------------------------------------------------------------------

let timer = 0;
let isLooking = false;

async function look() {
    if (isLooking || document.hidden) return;
    isLooking = true;
    const began = performance.now();
    try {
        const answer = await fetch(location.href, {
            cache: "no-store",
            signal: AbortSignal.timeout(15_000),
        });
        if (answer.redirected && new URL(answer.url).pathname !== location.pathname) {
            fail("you are logged out, or this is not there any more; load it anew");
        } else if (!answer.ok) {
            fail(`the server answers ${answer.status}`);
        } else {
            show(new DOMParser().parseFromString(await answer.text(), "text/html"));
            if (trouble) spoken.textContent = "This page is up to date again.";
            trouble = "";
            seenAt = performance.now();
        }
    } catch {
        fail("connection lost");
    } finally {
        isLooking = false;
        tell();
        const every = Math.min(60, ...parts().map((part) => Number(part.dataset.every || EVERY_S)));
        clearTimeout(timer);
        timer = setTimeout(look, Math.max(every * 1000, PATIENCE * (performance.now() - began)));
    }
}

function show(now) {
    const selection = getSelection();
    const focused = document.activeElement;
    for (const part of parts()) {
        const wanted = now.querySelector(`[data-live="${CSS.escape(nameOf(part))}"]`);
        // Text that is being selected would lose its mark.
        const isSelected = !selection.isCollapsed && selection.containsNode(part, true);
        if (!wanted || isSelected || part.isEqualNode(wanted)) continue;
        const before = newsOf(part);
        follow(part, wanted);
        if (newsOf(part) !== before) {
            unspoken.add(calledBy(part));
            part.dispatchEvent(new CustomEvent("live", { bubbles: true }));
        }
    }
    // What is moved among its siblings loses it.
    if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
    speak();
}

// --- what another page keeps live -------------------------------------------------------------------

class Folded {
    constructor(details) {
        this.details = details;
        this.place = details.querySelector("div");
        this.timer = 0;
        this.isLooking = false;
        details.addEventListener("toggle", () => this.look());
        document.addEventListener("visibilitychange", () => this.look());
        this.look();
    }

    async look() {
        if (this.isLooking || document.hidden || !this.details.open) return;
        this.isLooking = true;
        clearTimeout(this.timer);
        const began = performance.now();
        let every = EVERY_S;
        try {
            const answer = await fetch(this.details.dataset.from, { signal: AbortSignal.timeout(15_000) });
            const page = new DOMParser().parseFromString(await answer.text(), "text/html");
            const part = answer.ok && !answer.redirected ? page.querySelector("[data-live]") : null;
            if (part) {
                every = Number(part.dataset.every || EVERY_S);
                const selection = getSelection();
                const isSelected = !selection.isCollapsed && selection.containsNode(this.place, true);
                if (!isSelected) followChildren(this.place, part);
            }
        } catch {
            // What is there stays; the page's own looks say that the connection is lost.
        }
        this.isLooking = false;
        const took = performance.now() - began;
        this.timer = setTimeout(() => this.look(), Math.max(every * 1000, PATIENCE_BESIDE * took));
    }
}

for (const details of document.querySelectorAll("details[data-from]")) new Folded(details);

if (parts().length) {
    const content = document.getElementById("content") || document.body;
    content.prepend(status);
    content.append(spoken);
    document.addEventListener("visibilitychange", () => {
        if (!document.hidden) look();
    });
    setInterval(() => {
        tell();
        speak();
    }, 1000);
    tell();
    timer = setTimeout(look, EVERY_S * 1000);
}
