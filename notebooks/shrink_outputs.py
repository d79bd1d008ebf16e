"""Makes the stored outputs of the notebooks small; `make notebooks` runs it last.

Plots become PNGs with few colours and lose their text form (`<Figure size ...>`), the lines that a
cell prints become one output, and execution times are dropped, so that a new run changes little.
"""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLOURS = 16
UNLIKE = 40
"""The least distance of two colours in RGB."""


def small_png(encoded: str) -> str:
    """Return a base64-encoded PNG with a palette in place of full colour."""
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    if image.mode != "P":
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
        image = on_few_colours(image)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def on_few_colours(image: Image.Image) -> Image.Image:
    """Return the image with a palette of its most frequent colours that are not alike.

    They stay exactly as they are. Pillow's own palettes average colours, so that a thin line or a
    patch in a legend becomes another colour.
    """
    pixels = np.asarray(image, int).reshape(-1, 3)
    colours, places, counts = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    palette = colours[[counts.argmax()]]
    for colour in colours[np.argsort(-counts)]:
        if len(palette) < COLOURS and np.linalg.norm(palette - colour, axis=1).min() > UNLIKE:
            palette = np.vstack([palette, colour])
    nearest = np.linalg.norm(colours[:, None] - palette, axis=2).argmin(1).astype("uint8")
    small = Image.fromarray(nearest[places.reshape(image.height, image.width)])
    small = small.convert("P")
    small.putpalette(palette.astype("uint8").tobytes())
    return small


def small_svg(text: str) -> str:
    """Return matplotlib's SVG without metadata and indentation, to a tenth of a pixel."""
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = text.replace("</style>", "text{font-family:'DejaVu Sans',sans-serif}</style>")
    text = re.sub(r' transform="rotate\(-0[^"]*"| id="(?=[a-z.]+_\d)[^"]*"', "", text)
    text = re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", text)
    text = re.sub(r'style="[^"]*"', lambda style: re.sub(r"([:;]) ", r"\1", style[0]), text)
    return re.sub(r">\s+<", "><", re.sub(r"\s+", " ", text))


def small_outputs(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the outputs of a cell with small plots and with printed lines joined."""
    small: list[dict[str, Any]] = []
    for output in outputs:
        last = small[-1] if small else {}
        if output["output_type"] == "stream" and last.get("name") == output["name"]:
            last["text"] = "".join([*last["text"], *output["text"]]).splitlines(keepends=True)
            continue
        data = output.get("data", {})
        if "image/png" in data:
            data["image/png"] = small_png("".join(data["image/png"]))
        if "image/svg+xml" in data:
            data["image/svg+xml"] = small_svg("".join(data["image/svg+xml"]))
        if len(data) > 1:
            data.pop("text/plain", None)
        small.append(output)
    return small


def shrink(path: Path) -> None:
    """Rewrite the notebook in place; its sources stay as they are."""
    notebook = json.loads(path.read_text("utf-8"))
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        if cell["cell_type"] == "code":
            cell["outputs"] = small_outputs(cell["outputs"])
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    for path in sorted(Path(__file__).parent.glob("*.ipynb")):
        shrink(path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
