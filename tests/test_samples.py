"""Grids that show what they were given; sample files: videos that a browser plays in the right colours, one file a prompt and moment, nothing half written."""

from __future__ import annotations

import base64
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo_fast.samples import (
    evenly,
    first_frame,
    image_grid,
    moment_order,
    read_prompt_samples,
    write_prompt_samples,
    write_video,
)
from tests.browser import told


def solid(color: tuple[int, int, int], frames: int = 6, height: int = 32, width: int = 48) -> torch.Tensor:
    return torch.tensor(color, dtype=torch.uint8).reshape(1, 3, 1, 1).expand(frames, 3, height, width)


def decode(path: Path) -> torch.Tensor:
    """uint8 [F, 3, H, W]"""
    with av.open(str(path)) as container:
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    return torch.stack(frames).permute(0, 3, 1, 2)


def test_image_grid_places_tiles_enlarges_without_smoothing_and_leaves_gaps_clear() -> None:
    images = torch.zeros(3, 3, 2, 2, dtype=torch.uint8)
    images[1, 0], images[2, 1, 0, 1] = 200, 100
    grid = image_grid(images, columns=2, scale=3)
    assert grid.size == (2 * 6 + 4, 2 * 6 + 4)
    assert grid.getpixel((12, 2)) == (200, 0, 0, 255)
    assert grid.getpixel((8, 2))[3] == grid.getpixel((2, 8))[3] == grid.getpixel((12, 12))[3] == 0
    assert {grid.getpixel((x, 10)) for x in (3, 4, 5)} == {(0, 100, 0, 255)}
    assert {grid.getpixel((x, 10)) for x in (0, 1, 2)} == {(0, 0, 0, 255)}


@pytest.mark.parametrize(("size", "count", "expected"), [((64, 64), 16, 4), ((512, 512), 4, 2), ((30, 60), 8, 2)])
def test_image_grid_defaults_are_near_square_and_visible(size: tuple[int, int], count: int, expected: int) -> None:
    height, width = size
    grid = image_grid(torch.zeros(count, 3, height, width, dtype=torch.uint8))
    scale = -(-128 // max(size))
    assert grid.width // (width * scale) == expected
    assert max(height, width) * scale >= 128


def test_image_grid_captions_sit_below_and_are_cut_to_the_tile() -> None:
    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    plain, captioned = image_grid(images), image_grid(images, ["A7", "a very long prompt\nof two lines " * 5])
    below = captioned.crop((0, plain.height, captioned.width, captioned.height)).getchannel("A")
    assert captioned.height > plain.height
    assert below.crop((0, 0, 128, below.height)).getbbox() is not None
    gap = below.crop((128, 0, 132, below.height))
    assert gap.getbbox() is None, "a caption stays under its own tile"
    assert below.crop((132, 0, 260, below.height)).getbbox() is not None


def test_image_grid_shows_a_videos_first_frame() -> None:
    videos = torch.randint(0, 255, (2, 5, 3, 8, 8), dtype=torch.uint8)
    assert image_grid(videos).tobytes() == image_grid(videos[:, 0].contiguous()).tobytes()


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 4, 4, 4), (0, 3, 4, 4)])
def test_image_grid_names_what_it_wants(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"wants uint8 .* got torch.float32"):
        image_grid(torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match="uint8"):
        image_grid(torch.zeros(shape, dtype=torch.uint8))


def test_image_grid_wants_a_caption_for_each_image() -> None:
    with pytest.raises(ValueError, match="1 captions for 2 images"):
        image_grid(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), ["one"])


def test_a_video_is_h264_yuv420p_with_its_frames_rate_colours_and_the_index_in_front(tmp_path: Path) -> None:
    frames = torch.cat([solid((200, 40, 90), 3), solid((20, 180, 60), 4)])
    write_video(tmp_path / "v.mp4", frames, 12.5)
    with av.open(str(tmp_path / "v.mp4")) as container:
        (stream,) = container.streams.video
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, stream.frames, float(stream.average_rate)) == (48, 32, 7, 12.5)
    difference = (decode(tmp_path / "v.mp4").int() - frames.int()).abs()
    assert difference.max() <= 4, "the colours of flat areas survive"
    data = (tmp_path / "v.mp4").read_bytes()
    assert 0 < data.find(b"moov") < data.find(b"mdat"), "a browser starts before it has the whole file"
    assert [path.name for path in tmp_path.iterdir()] == ["v.mp4"]


@pytest.mark.parametrize(("height", "width"), [(33, 48), (32, 47), (5, 7), (1, 1)])
def test_odd_sizes_grow_by_their_last_row_and_column(tmp_path: Path, height: int, width: int) -> None:
    frames = solid((110, 180, 130), 2, height, width)
    write_video(tmp_path / "v.mp4", frames, 8)
    decoded = decode(tmp_path / "v.mp4").int()
    assert decoded.shape[2:] == (height + height % 2, width + width % 2)
    assert (decoded - frames[:1, :, :1, :1].int()).abs().max() <= 4, "no black edge"


@pytest.mark.parametrize(
    ("frames", "fps", "message"),
    [
        (torch.zeros(2, 3, 4, 4), 8, "uint8 .*float32"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), 8, r"\[2, 1, 4, 4\]"),
        (torch.zeros(0, 3, 4, 4, dtype=torch.uint8), 8, "not empty"),
        (torch.zeros(1, 2, 3, 4, 4, dtype=torch.uint8), 8, r"wants uint8 \[F, 3, H, W\], not"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), 0, "positive"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), float("nan"), "positive"),
    ],
)
def test_write_video_names_what_it_wants_and_leaves_nothing(
    tmp_path: Path, frames: torch.Tensor, fps: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_video(tmp_path / "v.mp4", frames, fps)
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_encoding_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "v.mp4", solid((1, 2, 3)), 8)
    noise = torch.randint(0, 255, (150, 3, 32, 32), dtype=torch.uint8)  # enough for the encoder to have written some
    before = (tmp_path / "v.mp4").read_bytes()
    encode, calls = av.VideoFrame.from_ndarray, []

    def fails_late(*arguments: object, **more: object) -> object:
        calls.append(1)
        if len(calls) == 140:
            raise MemoryError
        return encode(*arguments, **more)

    monkeypatch.setattr(av, "VideoFrame", type("Failing", (), {"from_ndarray": staticmethod(fails_late)}))
    with pytest.raises(MemoryError):
        write_video(tmp_path / "v.mp4", noise, 8)
    assert (tmp_path / "v.mp4").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["v.mp4"]


def test_chromium_plays_a_video_in_its_colours(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4", solid((200, 40, 90), 12, 64, 63), 15)
    source = base64.b64encode((tmp_path / "v.mp4").read_bytes()).decode()
    answer = told(
        f"""<video id="v" muted src="data:video/mp4;base64,{source}"></video><script>
        v.requestVideoFrameCallback(() => {{
          const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
          context.drawImage(v, 0, 0);
          fetch("/told?" + [v.videoWidth, v.videoHeight, ...context.getImageData(30, 30, 1, 1).data].join());
        }});
        v.onerror = () => fetch("/told?" + v.error.code);
        v.play();
        </script>""",
        tmp_path / "profile",
    )
    width, height, red, green, blue, alpha = map(int, answer.split(","))
    assert (width, height, alpha) == (64, 64, 255)
    assert max(abs(red - 200), abs(green - 40), abs(blue - 90)) <= 4


def test_prompt_samples_are_one_file_a_prompt_and_read_back_in_the_order_of_time(tmp_path: Path) -> None:
    images = torch.randint(0, 255, (2, 3, 8, 10), dtype=torch.uint8)
    for moment in ("after", "step_000100", "before", "step_000020"):
        paths = write_prompt_samples(tmp_path, moment, images, [7, 0], [f"a cat,\nsitting\n{moment} 0.5", "a dog"])
        assert paths == [tmp_path / f"prompts/{i}/{moment}.png" for i in ("00007", "00000")]
    with Image.open(paths[0]) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB")))
    assert torch.equal(pixels.permute(2, 0, 1), images[0])

    found = read_prompt_samples(tmp_path, 12, 8)
    assert list(found) == [0, 7]
    assert [sample.moment for sample in found[7]] == ["before", "step_000020", "step_000100", "after"]
    assert (found[7][0].prompt, found[7][0].note) == ("a cat, sitting", "before 0.5")
    assert (found[0][0].prompt, found[0][0].note) == ("a dog", "")
    assert list(read_prompt_samples(tmp_path, 1, 8)) == [0]
    assert [sample.moment for sample in read_prompt_samples(tmp_path, 2, 2)[7]] == ["before", "after"]
    assert read_prompt_samples(tmp_path / "nowhere", 12, 8) == {}


def test_prompt_samples_of_videos_are_mp4s(tmp_path: Path) -> None:
    videos = torch.stack([solid((200, 40, 90)), solid((20, 180, 60))])
    paths = write_prompt_samples(tmp_path, "before", videos, [0, 1], fps=8)
    assert [path.name for path in paths] == ["before.mp4", "before.mp4"]
    assert (decode(paths[1]).int() - videos[1].int()).abs().max() <= 4
    red, green, blue = first_frame(paths[0]).getpixel((5, 5))
    assert max(abs(red - 200), abs(green - 40), abs(blue - 90)) <= 4
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["before.mp4", "before.mp4"]


def test_what_is_not_a_sample_is_not_read(tmp_path: Path) -> None:
    write_prompt_samples(tmp_path, "before", torch.zeros(1, 3, 4, 4, dtype=torch.uint8), [3])
    (tmp_path / "prompts/00003/.after.png.123.tmp").write_bytes(b"half")
    (tmp_path / "prompts/00003/notes.pdf").write_bytes(b"x")
    (tmp_path / "prompts/old").mkdir()
    (tmp_path / "prompts/00004").mkdir()
    assert {i: [s.moment for s in found] for i, found in read_prompt_samples(tmp_path, 12, 8).items()} == {
        3: ["before"]
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(name="../x"), "name like before"),
        (dict(name=""), "name like before"),
        (dict(index=[0]), "1 prompt indices for 2 samples"),
        (dict(captions=["a"]), "2 prompt indices and 1 captions for 2 samples"),
        (dict(index=[4, 4]), "each prompt once"),
        (dict(index=[-1, 4]), "index >= 0"),
        (dict(media=torch.zeros(2, 3, 4, 4)), "wants uint8 .* or .* got torch.float32"),
        (dict(media=torch.zeros(0, 3, 4, 4, dtype=torch.uint8)), "not empty"),
    ],
)
def test_write_prompt_samples_names_what_it_wants_and_writes_nothing(
    tmp_path: Path, arguments: dict, message: str
) -> None:
    right = {"name": "before", "media": torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "index": [0, 1]}
    with pytest.raises(ValueError, match=message):
        write_prompt_samples(tmp_path, **(right | arguments))
    assert list(tmp_path.iterdir()) == []


def test_moments_sort_as_time_does_and_thinning_keeps_both_ends() -> None:
    moments = ["after", "step_1000000", "step_000009", "before", "step_000010"]
    assert sorted(moments, key=moment_order) == ["before", "step_000009", "step_000010", "step_1000000", "after"]
    assert evenly(range(100), 5) == [0, 25, 50, 74, 99]
    assert evenly(range(3), 5) == [0, 1, 2]
