"""Text becomes tokens and the tokens after them, and a small transformer learns to tell them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from stalempi.errors import ConfigError
from stalempi.train.data import Data
from stalempi.train.datasets import load_dataset
from stalempi.train.evaluate import evaluate
from stalempi.train.loader import DataLoader
from stalempi.train.loss import count_correct, cross_entropy
from stalempi.train.models import TEXT_MODELS, build_model
from stalempi.train.sampler import DistributedSampler
from stalempi.train.text import TextSamples

CPU = torch.device("cpu")


def spell(tokens: torch.Tensor) -> str:
    return bytes(tokens.tolist()).decode()


@pytest.fixture(scope="module")
def made_up() -> Data:
    return load_dataset("text-synthetic", sequence_length=32)


def test_targets_are_the_tokens_one_further() -> None:
    samples = TextSamples(torch.arange(10, dtype=torch.uint8), 3)
    assert len(samples) == 3
    x, y = samples.batch([0, 2])
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
    assert x.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert y.tolist() == [[1, 2, 3], [7, 8, 9]]
    assert [part.tolist() for part in samples[1]] == [[3, 4, 5], [4, 5, 6]]


def test_shifts_depend_on_seed_epoch_and_sample_and_stay_in_the_text() -> None:
    samples = TextSamples(torch.arange(250, dtype=torch.uint8), 16, shift=True, seed=3)
    x, y = samples.batch(range(len(samples)), epoch=1)
    starts = x[:, 0] - 16 * torch.arange(len(samples))
    assert int(starts.min()) >= 0
    assert int(starts.max()) < 16
    assert len(set(starts.tolist())) > 3
    assert torch.equal(y, x + 1)
    assert torch.equal(samples.batch([4], epoch=1)[0][0], x[4])
    assert not torch.equal(samples.batch(range(len(samples)), epoch=2)[0], x)
    assert torch.equal(samples.plain().batch([4])[0][0], torch.arange(64, 80))


def test_a_file_and_a_folder_are_read_as_bytes_and_the_last_tenth_is_for_testing(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("b" * 50)
    (tmp_path / "deep" / "c.txt").write_text("c" * 50)
    (tmp_path / "a.log").write_text("not this")
    folder = load_dataset("text", data_dir=tmp_path, sequence_length=4).plain()
    assert (len(folder.train), len(folder.test), folder.num_classes, folder.input_shape) == (22, 2, 256, (4,))
    assert spell(folder.train.batch([11, 12, 13])[0].flatten()) == "bbbbbbcccccc"
    file = load_dataset("text", data_dir=tmp_path / "b.txt", sequence_length=4)
    assert spell(file.test[0][0]) == "bbbb"


def test_made_up_text_is_the_same_for_a_seed_and_its_verbs_agree(made_up: Data) -> None:
    again, other = (load_dataset("text-synthetic", sequence_length=32, seed=seed) for seed in (0, 1))
    everything = range(len(made_up.test))
    assert torch.equal(made_up.test.batch(everything)[0], again.test.batch(everything)[0])
    assert not torch.equal(made_up.test.batch(everything)[0], other.test.batch(everything)[0])
    sentences = spell(made_up.plain().train.batch(range(200))[0].flatten()).splitlines()[1:-1]
    plain = [words for words in map(str.split, sentences) if len(words) == 5 and words[0] in ("a", "two")]
    assert len(plain) > 5
    for article, noun, verb, *_ in plain:
        if noun.rstrip("s") in {"worker", "server", "river", "garden", "letter", "window", "engine", "bird"}:
            assert verb.endswith("s") == (article == "a"), (article, noun, verb)


def test_loss_and_accuracy_are_by_token() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    by_hand = -torch.stack([logits[b, t].log_softmax(0)[targets[b, t]] for b in range(2) for t in range(3)])
    torch.testing.assert_close(cross_entropy(logits, targets), by_hand.mean())
    torch.testing.assert_close(cross_entropy(logits, targets, reduction="sum"), by_hand.sum())
    assert count_correct(logits, logits.argmax(2)) == 6
    # of images it is torch's own, to the bit
    assert torch.equal(cross_entropy(logits[0], targets[0]), nn.functional.cross_entropy(logits[0], targets[0]))


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_transformer_sees_no_token_that_is_still_to_come(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, num_classes=11, input_shape=(8,))
    assert isinstance(model, nn.Sequential)
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 11)
    assert before.dtype == torch.float32
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])
    assert model(tokens[:, :3]).shape == (2, 3, 11)  # shorter texts are fine
    cross_entropy(before, tokens).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.load_state_dict(build_model(name, num_classes=11, input_shape=(8,)).state_dict(), strict=True)


def test_a_tied_transformer_has_one_matrix_for_both_ends() -> None:
    model = build_model("transformer-tiny-tied", num_classes=11, input_shape=(8,))
    assert model.get_parameter("logits.weight") is model.get_parameter("embed.tokens.weight")


def test_at_first_every_token_is_as_likely_and_later_the_text_is_learned(made_up: Data) -> None:
    torch.manual_seed(0)
    model = build_model("transformer-tiny", num_classes=made_up.num_classes, input_shape=made_up.input_shape)
    assert evaluate(model, made_up.test, device=CPU)[1] == pytest.approx(math.log(256), abs=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(made_up.train, 32, sampler=DistributedSampler(made_up.train, num_workers=1, worker_rank=0))
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    accuracy, loss = evaluate(model, made_up.test, device=CPU)
    assert loss < 2.0
    assert accuracy > 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "text"}, "'text' needs data_dir"),
        ({"name": "text", "data_dir": "/nowhere"}, "cannot read text from /nowhere: No such file"),
        ({"name": "text-synthetic", "data_dir": "/x"}, "'text-synthetic' has no use for data_dir"),
        ({"name": "text-synthetic", "sequence_length": 0}, "sequence_length=0"),
        ({"name": "text-synthetic", "sequence_length": 99999}, "hold no sample of 99999 tokens"),
        ({"name": "digits", "sequence_length": 8}, "'digits' has no use for sequence_length"),
    ],
)
def test_what_cannot_be_loaded_is_one_line_with_a_way_out(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_dataset(**options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_an_empty_folder_or_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.txt file in"):
        load_dataset("text", data_dir=tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match="text: 0 bytes"):
        load_dataset("text", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        ("cnn", (8,), "model 'cnn' is not for text: choose one of transformer-tiny"),
        ("resnet18", (8,), "model 'resnet18' is not for text"),
        ("transformer-tiny", (3, 8, 8), "model 'transformer-tiny' is not for images: choose one of mlp"),
        ("transformer-tinny", (8,), "did you mean transformer-tiny"),
        ("mlp", (8, 8), r"\(8, 8\): give classes and \(C, H, W\), or \(T,\) of text"),
    ],
)
def test_a_model_for_other_data_is_refused(model: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(model, num_classes=4, input_shape=shape)
