// A small reactive store and a list view that renders from it.

import { readFile, writeFile } from "node:fs/promises";

const listeners = new WeakMap();

export function createStore(initial) {
  let state = structuredClone(initial);
  const store = {
    get: () => state,
    update(change) {
      const next = typeof change === "function" ? change(state) : { ...state, ...change };
      if (Object.is(next, state)) return;
      state = next;
      for (const listener of listeners.get(store) ?? []) listener(state);
    },
    subscribe(listener) {
      const set = listeners.get(store) ?? new Set();
      set.add(listener);
      listeners.set(store, set);
      return () => set.delete(listener);
    },
  };
  return store;
}

export class TodoList extends HTMLElement {
  static observedAttributes = ["filter"];
  #store = createStore({ items: [], filter: "all" });
  #unsubscribe = null;

  connectedCallback() {
    this.#unsubscribe = this.#store.subscribe(() => this.render());
    this.addEventListener("click", (event) => {
      const id = event.target.closest("[data-id]")?.dataset.id;
      if (id !== undefined) this.toggle(Number(id));
    });
    this.render();
  }

  disconnectedCallback() {
    this.#unsubscribe?.();
  }

  attributeChangedCallback(name, _before, after) {
    if (name === "filter") this.#store.update({ filter: after ?? "all" });
  }

  add(title) {
    const trimmed = title.trim();
    if (!trimmed) throw new TypeError("a title must not be empty");
    this.#store.update((state) => ({
      ...state,
      items: [...state.items, { id: state.items.length, title: trimmed, done: false }],
    }));
  }

  toggle(id) {
    this.#store.update((state) => ({
      ...state,
      items: state.items.map((item) => (item.id === id ? { ...item, done: !item.done } : item)),
    }));
  }

  render() {
    const { items, filter } = this.#store.get();
    const visible = items.filter((item) => filter === "all" || (filter === "done") === item.done);
    this.innerHTML = `
      <ul>
        ${visible.map(({ id, title, done }) => `<li data-id="${id}" class="${done ? "done" : ""}">${escape(title)}</li>`).join("\n")}
      </ul>
      <p>${visible.length} of ${items.length} shown</p>`;
  }
}

const escape = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

/** Retries `task` with exponential back-off; rethrows the last error. */
export async function retry(task, { attempts = 5, delay = 200 } = {}) {
  for (let attempt = 1; ; attempt++) {
    try {
      return await task(attempt);
    } catch (error) {
      if (attempt >= attempts) throw error;
      await new Promise((resolve) => setTimeout(resolve, delay * 2 ** (attempt - 1)));
    }
  }
}

export function debounce(fn, wait) {
  let timer;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => fn(...args), wait);
  };
}

interface Page<T> {
  readonly items: readonly T[];
  readonly next?: string;
}

export async function* pages<T>(fetchPage: (cursor?: string) => Promise<Page<T>>): AsyncGenerator<T> {
  let cursor: string | undefined;
  do {
    const page = await fetchPage(cursor);
    yield* page.items;
    cursor = page.next;
  } while (cursor !== undefined);
}

type Result<T, E = Error> = { ok: true; value: T } | { ok: false; error: E };

export function parsePort(text: string): Result<number> {
  const port = Number.parseInt(text, 10);
  if (!Number.isInteger(port) || port < 1 || port > 65535) {
    return { ok: false, error: new RangeError(`"${text}" is not a port`) };
  }
  return { ok: true, value: port };
}

async function main() {
  const config = JSON.parse(await readFile("config.json", "utf8"));
  const { host = "localhost", port = 8080, tags: [first, ...rest] = [] } = config;
  console.log(`serving on http://${host}:${port}/ (${first ?? "untagged"}, ${rest.length} more)`);
  await writeFile("config.out.json", JSON.stringify({ host, port, first }, null, 2));
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
