"""Samples as files that a person looks at: a grid of many, and one picture or video a prompt and moment.

    run_dir/samples/<moment>.png                    image_grid, saved by the trainer
    run_dir/samples/prompts/<index>/<moment>.png    write_prompt_samples; .mp4 for videos, .txt for the caption

A moment is "before", "step_000010" or "after". The report and the dashboard read what lies there.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

T = TypeVar("T")


def image_grid(
    images: Tensor, captions: list[str] | None = None, columns: int | None = None, scale: int | None = None
) -> Image:
    """Samples as one picture, transparent between the tiles (so that it sits on a light page and on a dark one).

    images: uint8 [N, 3, H, W], or videos [N, F, 3, H, W], of which the first frame is shown. captions: one a sample, cut to
    the tile's width. columns: by default what comes nearest to a square. scale: integer enlargement without smoothing;
    by default the least that makes a tile 128 pixels wide or high.
    """
    from PIL import Image, ImageDraw, ImageFont

    _check("image_grid", images, 4, 5)
    frames = images[:, 0] if images.ndim == 5 else images
    count, _, height, width = frames.shape
    if captions is not None and len(captions) != count:
        raise ValueError(f"image_grid got {len(captions)} captions for {count} images")
    scale = scale or max(1, math.ceil(128 / max(height, width)))
    columns = min(count, columns or math.ceil(math.sqrt(count * height / width)))
    tile, gap = (width * scale, height * scale), max(4, width * scale // 32)
    size = max(11, min(28, tile[0] // 9))
    font, below = ImageFont.load_default(size), round(1.6 * size) if captions else 0
    pitch = tile[0] + gap, tile[1] + below + gap
    grid = Image.new("RGBA", (columns * pitch[0] - gap, math.ceil(count / columns) * pitch[1] - gap))
    draw = ImageDraw.Draw(grid)
    for i, pixels in enumerate(frames.permute(0, 2, 3, 1).cpu().contiguous().numpy()):
        x, y = i % columns * pitch[0], i // columns * pitch[1]
        grid.paste(Image.fromarray(pixels).resize(tile, Image.Resampling.NEAREST), (x, y))
        if captions is not None:
            text = whole = " ".join(captions[i].split())
            while text.strip("…") and font.getlength(text) > tile[0]:
                whole = whole[:-1]
                text = whole.rstrip() + "…"
            # Mid grey: contrast above 4 on white and on near-black alike.
            draw.text((x + tile[0] / 2, y + tile[1] + below / 2), text, (122, 122, 122), font, "mm")
    return grid


def write_video(path: Path, frames: Tensor, fps: float) -> None:
    """Write an mp4 that browsers play: H.264, yuv420p, BT.709, the index in front. A reader sees the old file or the new.

    frames: uint8 [F, 3, H, W] on any device. An odd width or height, which yuv420p cannot hold, grows by its last column or
    row. Raises ValueError for anything else, and for fps that is not positive and finite.
    """
    import av
    import torch

    _check("write_video", frames, 4)
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"write_video wants a positive number of frames per second; got {fps}")
    pixels = frames.permute(0, 2, 3, 1).cpu()
    if pixels.shape[1] % 2:
        pixels = torch.cat([pixels, pixels[:, -1:]], 1)
    if pixels.shape[2] % 2:
        pixels = torch.cat([pixels, pixels[:, :, -1:]], 2)
    rate = Fraction(fps).limit_denominator(1001)
    with _replacing(Path(path)) as temporary:
        with av.open(str(temporary), "w", format="mp4", options={"movflags": "faststart"}) as container:
            # x264 calls crf 18 visually lossless; its default, 23, is made for streaming.
            stream = container.add_stream("libx264", rate=rate, options={"crf": "18"})
            stream.height, stream.width, stream.pix_fmt = pixels.shape[1], pixels.shape[2], "yuv420p"
            # Without the tags a player guesses the matrix by the height, and colours shift. 1: BT.709, and limited range.
            tags = stream.codec_context
            tags.colorspace = tags.color_primaries = tags.color_trc = tags.color_range = 1
            for picture in pixels.contiguous().numpy():
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())


def first_frame(path: Path) -> Image:
    """The first picture of a video file, as RGB."""
    import av

    with av.open(str(path)) as container:
        return next(container.decode(video=0)).to_image()


def write_prompt_samples(
    folder: Path,
    name: str,
    media: Tensor,
    index: Sequence[int],
    captions: Sequence[str] | None = None,
    *,
    fps: float = 16.0,
) -> list[Path]:
    """One file a prompt: folder/prompts/<index>/<name>.png, or .mp4 for videos. Returns the paths in the order of `media`.

    media: uint8 [N, 3, H, W] or [N, F, 3, H, W], in its own resolution. index: the N prompts, each once, the same at every
    moment. captions: one a sample, kept beside it as <name>.txt: the prompt, then a line of its own for what is said of this
    sample (its score). Ranks may write different prompts at the same time. Raises ValueError where these disagree or `name` is
    not a plain word.
    """
    from PIL import Image

    _check("write_prompt_samples", media, 4, 5)
    if not re.fullmatch(r"\w+", name):
        raise ValueError(f"write_prompt_samples wants a name like before, step_000010 or after; got {name!r}")
    if len(index) != len(media) or (captions is not None and len(captions) != len(media)):
        texts = "" if captions is None else f" and {len(captions)} captions"
        raise ValueError(f"write_prompt_samples got {len(index)} prompt indices{texts} for {len(media)} samples")
    if len(set(index)) != len(index) or min(index) < 0:
        raise ValueError(f"write_prompt_samples wants each prompt once, by an index >= 0; got {list(index)}")
    paths = []
    for i, (number, sample) in enumerate(zip(index, media, strict=True)):
        place = Path(folder) / "prompts" / f"{number:05d}"
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{name}.{'png' if media.ndim == 4 else 'mp4'}"
        if captions is not None:
            with _replacing(path.with_suffix(".txt")) as temporary:
                temporary.write_text(captions[i], "utf-8")
        if media.ndim == 5:
            write_video(path, sample, fps)
        else:
            with _replacing(path) as temporary:
                Image.fromarray(sample.permute(1, 2, 0).cpu().contiguous().numpy()).save(temporary, "PNG")
        paths.append(path)
    return paths


class Sample(NamedTuple):
    """A prompt's sample at one moment, as it lies on the disk."""

    moment: str
    path: Path
    prompt: str
    note: str


def read_prompt_samples(folder: Path, prompts: int, moments: int) -> dict[int, list[Sample]]:
    """The samples of the first `prompts` prompts under folder/prompts, by index; of each the earliest to the latest.

    Where a prompt has more than `moments`, as many are left, evenly spaced, the first and the last among them.
    """
    places = {int(place.name): place for place in Path(folder).glob("prompts/*") if re.fullmatch(r"\d+", place.name)}
    found: dict[int, list[Sample]] = {}
    for number in sorted(places)[:prompts]:
        files = [path for path in places[number].iterdir() if re.fullmatch(r"\w+\.(png|mp4)", path.name)]
        kept = evenly(sorted(files, key=lambda path: moment_order(path.stem)), moments)
        samples = [Sample(path.stem, path, *_caption(path.with_suffix(".txt"))) for path in kept]
        if samples:
            found[number] = samples
    return found


def moment_order(moment: str) -> tuple[int, int, str]:
    """Sorts moments as time does: "before", "step_<n>" and "training_<n>" by n, "after"."""
    step = re.match(r"(?:step|training)_(\d+)", moment)
    place = {"before": 0, "after": 2}.get(moment, 1)
    return place, int(step[1]) if step else 0, moment


def moment_words(moment: str) -> str:
    """ "step_000010" -> "step 10", "training_000010" -> "training 10"."""
    return re.sub(r"^(step|training)_(\d+)", lambda m: f"{m[1]} {int(m[2]):,}", moment).replace("_", " ")


def evenly(items: Sequence[T], most: int) -> list[T]:
    """All items, or `most` (at least 2) of them evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _caption(path: Path) -> tuple[str, str]:
    """Prompt and note, on one line each."""
    text = path.read_text("utf-8") if path.exists() else ""
    prompt, _, note = text.rpartition("\n") if "\n" in text else (text, "", "")
    return " ".join(prompt.split()), " ".join(note.split())


def _check(who: str, media: Tensor, *ranks: int) -> None:
    layouts = {4: "[F, 3, H, W]" if ranks == (4,) else "[N, 3, H, W]", 5: "[N, F, 3, H, W]"}
    right = media.ndim in ranks and media.shape[-3] == 3 and str(media.dtype) == "torch.uint8"
    if not right or media.numel() == 0:
        wanted = " or ".join(layouts[rank] for rank in ranks)
        raise ValueError(f"{who} wants uint8 {wanted}, not empty; got {media.dtype} {list(media.shape)}")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place at the end, or goes away with an error.

    Not metrics.write_atomic: its fsync, which a sample is not worth, would cost a validation of 32 prompts 64 of them.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
