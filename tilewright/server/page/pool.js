// The page pool as a grid: a cell for each page (or for several, in a large pool), coloured by the request that has it.

const COLOURS = ["#4f7cc4", "#d97757", "#3d9a78", "#a85ca0", "#c79a2c", "#4aa3b8", "#7b6ccb", "#c65a6e", "#7d9a3b", "#93705a"];
const SIZE = 12, GAP = 3, SMALL = 7, SMALL_GAP = 2;

export const FREE = -1, KEPT = -2;

export function colourOf(slot) {
  return slot === null ? "transparent" : COLOURS[slot % COLOURS.length];
}

export class Pool {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.cells = [];
    this.names = new Map();
    this.columns = 1;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  // runs: [owner slot | FREE | KEPT, sharers, how many cells]...
  show(runs, pagesPerCell, names) {
    this.cells = runs.flatMap(([owner, sharers, count]) => Array(count).fill([owner, sharers]));
    this.pagesPerCell = pagesPerCell;
    this.names = names;
    this.draw();
  }

  draw() {
    const { canvas, cells } = this;
    const [size, gap] = cells.length > 900 ? [SMALL, SMALL_GAP] : [SIZE, GAP];
    const width = canvas.parentElement.clientWidth;
    this.pitch = size + gap;
    this.columns = Math.max(1, Math.floor((width + gap) / this.pitch));
    const height = Math.ceil(cells.length / this.columns) * this.pitch || 1;
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const paint = { free: colourNamed("--free"), kept: colourNamed("--kept"), mark: colourNamed("--mark") };
    cells.forEach(([owner, sharers], index) => {
      const x = (index % this.columns) * this.pitch, y = Math.floor(index / this.columns) * this.pitch;
      context.fillStyle = owner === FREE ? paint.free : owner === KEPT ? paint.kept : colourOf(owner);
      context.beginPath();
      context.roundRect(x, y, size, size, size / 4);
      context.fill();
      if (sharers > 1) {
        context.fillStyle = paint.mark;
        context.beginPath();
        context.arc(x + size / 2, y + size / 2, size / 5, 0, 7);
        context.fill();
      }
    });
  }

  point(event) {
    const index = Math.floor(event.offsetY / this.pitch) * this.columns + Math.floor(event.offsetX / this.pitch);
    const cell = this.cells[index];
    this.tip.hidden = !cell || event.offsetX / this.pitch >= this.columns;
    if (this.tip.hidden) return;
    const [owner, sharers] = cell;
    const words = owner === FREE ? "free" : owner === KEPT ? "kept for reuse" : this.names.get(owner) ?? "in use";
    const first = index * this.pagesPerCell;
    const which = this.pagesPerCell > 1 ? `pages ${first}–${first + this.pagesPerCell - 1}` : `page ${first}`;
    this.tip.textContent = `${which}: ${words}${sharers > 1 ? `, shared by ${sharers}` : ""}`;
    this.tip.style.left = `${Math.min(Math.max(event.offsetX, 90), this.canvas.clientWidth - 90)}px`;
    this.tip.style.top = `${Math.floor(event.offsetY / this.pitch) * this.pitch}px`;
  }
}

// The value of a colour variable for the theme in force; light-dark() is only resolved where it is used.
const probe = document.createElement("i");
export function colourNamed(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.hidden = true;
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
