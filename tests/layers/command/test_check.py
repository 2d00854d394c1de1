"""`dsa check`: every self test passes, and each fails when its op is wrong."""

import errno
import importlib.metadata
import re
import time
from pathlib import Path

import pytest
import torch

import dsa
from dsa import backends, reference
from dsa.self_test import SELF_TESTS
from dsa_layers.command import health
from dsa_layers.command.main import main


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "no GPU for this test")
    monkeypatch.delenv("DSA_BACKEND", raising=False)


@pytest.mark.parametrize("name", SELF_TESTS)
def test_self_tests_pass_whatever_the_numbers(name):
    for seed in range(5):
        torch.manual_seed(seed)
        SELF_TESTS[name]("cpu")


def test_every_op_has_a_self_test():
    modules = {path.stem for path in (Path(dsa.__file__).parent / "ops").glob("*/[!_]*.py")}
    # The caches' own reads and writes feed the tests of the ops that use them.
    assert SELF_TESTS.keys() == modules - {"indexer_cache", "kv_cache"}


def scaled(position):
    """The result, or the one at that position of the results, 1 % too large."""

    def wrong(result, arguments):
        if position is None:
            return result * 1.01
        return tuple(x * 1.01 if i == position else x for i, x in enumerate(result))

    return wrong


def only_if(option, wrong, value=True):
    """Wrong in the calls with (or without) that option."""
    return lambda result, arguments: wrong(result, arguments) if arguments.get(option, False) is value else result


def swapped(result, arguments):
    """The first two picks change places."""
    return result[:, [1, 0, *range(2, result.shape[1])]]


def last_of_equals(result, arguments):
    """Ties go to the highest index."""
    scores, k = arguments[0], arguments[1]
    picked = scores.shape[1] - 1 - scores.flip(1).sort(descending=True, stable=True).indices[:, :k]
    return picked.sort().values.int()


def unmasked(result, arguments):
    return result.masked_fill(result == -torch.inf, 0.0)


def larger_first_row(result, arguments):
    return torch.cat((result[:1] * 1.01, result[1:]))


def shifted_lse(position):
    """As with a base-2 logarithm, or a sum that misses keys."""
    return lambda result, arguments: tuple(x + 0.01 if i == position else x for i, x in enumerate(result))


def empty_rows(position, value):
    """Rows without keys give something else than the contract's value."""

    def wrong(result, arguments):
        changed = list(result)
        changed[position] = torch.cat((result[position][:1], torch.full_like(result[position][1:], value)))
        return tuple(changed)

    return wrong


def without_infinity(result, arguments):
    return result[0], result[1].nan_to_num(posinf=0.0)


def scales_too_large(result, arguments):
    """The scales of the bytes that were written to pages of 656 are 1% too large."""
    pages = arguments[1]
    if pages.dtype == torch.uint8:
        scales = pages.view(-1, 656)[:, 512:528].view(torch.float32)
        scales.mul_(1.01)
    return result


def steeper(position):
    """The same numbers with gradients 1 % too large."""

    def wrong(result, arguments):
        changed = list(result)
        x = result[position]
        changed[position] = x.detach() + (x - x.detach()) * 1.01
        return tuple(changed)

    return wrong


def without_sink(result, arguments):
    """The first head, which the sink is to halve, is whole."""
    return torch.cat((result[0][:, :1] * 2, result[0][:, 1:]), 1), result[1]


def without_limit(result, arguments):
    gate, up = arguments[0], arguments[1]
    return reference.swiglu_cast_to_fp8(gate, up)


def without_shared(result, arguments):
    return result - arguments[3] if 3 in arguments else result


def next_key(result, arguments):
    """Every list begins one key late."""
    return torch.cat((result[..., 1:], torch.full_like(result[..., :1], -1)), -1)


def disturbed(key, dtype):
    """What is written into that argument, where it is of that dtype, is too large."""

    def wrong(result, arguments):
        written = arguments.get(key)
        if written is not None and written.dtype == dtype:
            written.copy_(written * 1.01)
        return result

    return wrong


# What fails: the self test, the function that is wrong, and how.
WRONG = {
    "cast": ("per_token_cast_to_fp8", "per_token_cast_to_fp8", only_if("hadamard", scaled(1), False)),
    "Hadamard": ("per_token_cast_to_fp8", "per_token_cast_to_fp8", only_if("hadamard", scaled(1))),
    "product": ("fp8_gemm_nt", "fp8_gemm_nt", scaled(None)),
    "product's first row": ("fp8_gemm_nt", "fp8_gemm_nt", larger_first_row),
    "grouped product": ("fp8_gemm_nt", "grouped_fp8_gemm_nt", scaled(None)),
    "training's selection": ("indexer_topk", "indexer_topk", next_key),
    "warm-up attention": ("indexer_warmup_attention", "indexer_warmup_attention", scaled(0)),
    "warm-up lse": ("indexer_warmup_attention", "indexer_warmup_attention", scaled(1)),
    "warm-up loss": ("indexer_warmup_attention", "indexer_warmup_attention", scaled(2)),
    "training's sparse attention": ("sparse_mla_attention", "sparse_mla_attention", scaled(0)),
    "training's sparse lse": ("sparse_mla_attention", "sparse_mla_attention", shifted_lse(1)),
    "training's lse of empty rows": ("sparse_mla_attention", "sparse_mla_attention", without_infinity),
    "training's sparse gradients": ("sparse_mla_attention", "sparse_mla_attention", steeper(0)),
    "sparse loss": ("sparse_indexer_loss", "sparse_indexer_loss", scaled(None)),
    "gate's experts": ("expert_routing", "moe_gate", lambda r, a: (15 - r[0], r[1])),
    "gate's weights": ("expert_routing", "moe_gate", scaled(1)),
    "order of entries": ("expert_routing", "sort_by_expert", lambda r, a: (r[0].flip(0), *r[1:])),
    "rows of entries": ("expert_routing", "sort_by_expert", lambda r, a: (r[0], r[1].abs(), r[2])),
    "ends of experts": ("expert_routing", "sort_by_expert", lambda r, a: (*r[:2], r[2] + 1)),
    "SwiGLU's scales": ("swiglu_cast_to_fp8", "swiglu_cast_to_fp8", scaled(1)),
    "SwiGLU without the limit": ("swiglu_cast_to_fp8", "swiglu_cast_to_fp8", without_limit),
    "experts' sum": ("combine_experts", "combine_experts", scaled(None)),
    "experts' first row": ("combine_experts", "combine_experts", larger_first_row),
    "experts' sum without the shared one": ("combine_experts", "combine_experts", without_shared),
    "weights": ("fp8_gemm_nt", "dequantize_per_block", scaled(None)),
    "weights' cast": ("fp8_gemm_nt", "per_block_cast_to_fp8", scaled(1)),
    "entries": ("compressed_kv", "compress_kv", scaled(0)),
    "entries' tokens": ("compressed_kv", "compress_kv", lambda r, a: (r[0], r[1] + 1)),
    "logits": ("fp8_mqa_logits", "fp8_mqa_logits", scaled(None)),
    "logits' mask": ("fp8_mqa_logits", "fp8_mqa_logits", unmasked),
    "unquantised logits": ("fp8_mqa_logits", "mqa_logits", scaled(None)),
    "paged logits": ("fp8_paged_mqa_logits", "fp8_paged_mqa_logits", scaled(None)),
    "paged logits' mask": ("fp8_paged_mqa_logits", "fp8_paged_mqa_logits", unmasked),
    "indexer queries": ("indexer_inputs", "quantize_indexer_queries", scaled(1)),
    "indexer keys": ("indexer_inputs", "read_indexer_cache", scaled(1)),
    "cached latents": ("mla_cache_inputs", "write_mla_cache", disturbed(4, torch.bfloat16)),
    "cached FP8 latents": ("mla_cache_inputs", "write_mla_cache", disturbed(4, torch.uint8)),
    "normed latents": ("mla_cache_inputs", "write_mla_cache", disturbed("out", torch.bfloat16)),
    "compressed entries": ("compressed_kv", "write_compressed_kv", disturbed(6, torch.bfloat16)),
    "compressed FP8 entries": ("compressed_kv", "write_compressed_kv", disturbed(6, torch.uint8)),
    "compressor's state": ("compressed_kv", "write_compressed_kv", disturbed(10, torch.float32)),
    "collapsed streams": ("hyper_connections", "hyper_collapse", scaled(0)),
    "collapsed streams' post": ("hyper_connections", "hyper_collapse", scaled(1)),
    "collapsed streams' comb": ("hyper_connections", "hyper_collapse", scaled(2)),
    "expanded streams": ("hyper_connections", "hyper_expand", scaled(None)),
    "top-k order": ("topk_indices", "topk_indices", swapped),
    "top-k ties": ("topk_indices", "topk_indices", last_of_equals),
    "dense decode": ("flash_mla_with_kvcache", "flash_mla_with_kvcache", only_if("is_fp8_kvcache", scaled(0), False)),
    "dense lse": ("flash_mla_with_kvcache", "flash_mla_with_kvcache", only_if("is_fp8_kvcache", shifted_lse(1), False)),
    "latents that are written": ("flash_mla_with_kvcache", "write_kv_cache", scales_too_large),
    "sparse decode": ("flash_mla_with_kvcache", "flash_mla_with_kvcache", only_if("is_fp8_kvcache", scaled(0))),
    "sparse lse": ("flash_mla_with_kvcache", "flash_mla_with_kvcache", only_if("is_fp8_kvcache", shifted_lse(1))),
    "prefill": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", scaled(0)),
    "prefill max_logits": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", shifted_lse(1)),
    "prefill lse": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", shifted_lse(2)),
    "prefill, empty rows": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", empty_rows(0, torch.nan)),
    "prefill, lse of empty rows": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", empty_rows(2, -torch.inf)),
    "window's keys": ("window_indices", "window_indices", next_key),
    "window's slots": ("window_indices", "window_slots", next_key),
    "ring's slots": ("window_indices", "window_slots", only_if(0, next_key, None)),
    "window": ("sliding_window_attention", "sliding_window_attention", scaled(0)),
    "window lse": ("sliding_window_attention", "sliding_window_attention", shifted_lse(1)),
    "window in a cache": ("sliding_window_attention", "sliding_window_decode", scaled(0)),
    "window in a ring": ("sliding_window_attention", "sliding_window_decode", only_if(2, scaled(0), None)),
    "window in a cache, lse": ("sliding_window_attention", "sliding_window_decode", shifted_lse(1)),
    "window and selected": ("sliding_window_attention", "window_sparse_attention", scaled(0)),
    "window and selected, lse": ("sliding_window_attention", "window_sparse_attention", shifted_lse(1)),
    "window and selected without the sink": ("sliding_window_attention", "window_sparse_attention", without_sink),
    "merge": ("merge_attention", "merge_attention", scaled(0)),
    "merged lse": ("merge_attention", "merge_attention", shifted_lse(1)),
    "merge, empty rows": ("merge_attention", "merge_attention", empty_rows(0, torch.nan)),
    "merge, lse of empty rows": ("merge_attention", "merge_attention", empty_rows(1, -torch.inf)),
    "merge without the sink": ("merge_attention", "merge_attention", without_sink),
    "rotation": ("rotary", "apply_rotary", only_if("out", scaled(None), False)),
    "rotation in place": ("rotary", "apply_rotary", disturbed("out", torch.bfloat16)),
    "norm": ("rms_norm", "rms_norm", only_if(1, scaled(None), None)),
    "weighted norm": ("rms_norm", "rms_norm", larger_first_row),
}


def break_op(monkeypatch, function, wrong):
    correct = getattr(dsa, function)

    def op(*args, **kwargs):
        return wrong(correct(*args, **kwargs), {**dict(enumerate(args)), **kwargs})

    monkeypatch.setattr(dsa, function, op)


def shifted(index):
    """Each key's successor."""
    return torch.where(index >= 0, index + 1, index)


def without_first(index):
    return torch.cat((torch.full_like(index[..., :1], -1), index[..., 1:]), -1)


def without_last(count):
    return lambda index: torch.cat((index[..., :-count], torch.full_like(index[..., -count:], -1)), -1)


def one_less(lengths):
    return lengths - 1


def one_percent(number):
    return number * 1.01


def one_percent_in_a_block(pair):
    scale = pair[1].clone()
    scale[0, 0] *= 1.01
    return pair[0], scale


def without_last_block(pair):
    q = pair[0].clone()
    q[:, -128:] = 0
    return q, pair[1]


DENSE, SPARSE = {"is_fp8_kvcache": False}, {"is_fp8_kvcache": True}
# What fails: the self test, the function, which of its arguments it gets wrong and how, and in which calls.
MISLED = {
    "dense decode, a key too few": ("flash_mla_with_kvcache", "flash_mla_with_kvcache", 3, one_less, DENSE),
    "dense decode, without the last tile": (
        *("flash_mla_with_kvcache", "flash_mla_with_kvcache", 3, lambda n: n - n % 64),
        DENSE,
    ),
    "sparse decode, keys off by one": ("flash_mla_with_kvcache", "flash_mla_with_kvcache", "indices", shifted, SPARSE),
    "sparse decode, a key too few": (
        *("flash_mla_with_kvcache", "flash_mla_with_kvcache", "indices", without_first),
        SPARSE,
    ),
    "sparse decode, without the last tile": (
        *("flash_mla_with_kvcache", "flash_mla_with_kvcache", "indices", without_last(36)),
        SPARSE,
    ),
    "prefill's scale": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", 3, one_percent, {}),
    "prefill, keys off by one": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", 2, shifted, {}),
    "prefill, a key too few": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", 2, without_first, {}),
    "prefill, without the last tile": ("flash_mla_sparse_fwd", "flash_mla_sparse_fwd", 2, without_last(32), {}),
    "training's scale": ("sparse_mla_attention", "sparse_mla_attention", 3, one_percent, {}),
    "training, a key too few": ("sparse_mla_attention", "sparse_mla_attention", 2, without_first, {}),
    "window, a key too few": ("sliding_window_attention", "sliding_window_attention", 4, one_less, {}),
    "window's scale": ("sliding_window_attention", "sliding_window_attention", 5, one_percent, {}),
    "window in a cache, a key too few": ("sliding_window_attention", "sliding_window_decode", 4, one_less, {}),
    "window and selected, a key too few": ("sliding_window_attention", "window_sparse_attention", 6, without_first, {}),
    "product, a block's scale": ("fp8_gemm_nt", "fp8_gemm_nt", 0, one_percent_in_a_block, {}),
    "product, without the last block": ("fp8_gemm_nt", "fp8_gemm_nt", 0, without_last_block, {}),
    "grouped product, a block's scale": ("fp8_gemm_nt", "grouped_fp8_gemm_nt", 0, one_percent_in_a_block, {}),
    "grouped product, a row off": ("fp8_gemm_nt", "grouped_fp8_gemm_nt", 2, lambda ends: ends - (ends == 2).int(), {}),
    "logits, a key too few": ("fp8_mqa_logits", "fp8_mqa_logits", 4, one_less, {}),
    "logits' weights": ("fp8_mqa_logits", "fp8_mqa_logits", 2, one_percent, {}),
    "paged logits, a key too few": ("fp8_paged_mqa_logits", "fp8_paged_mqa_logits", 3, one_less, {}),
    "warm-up's scale": ("indexer_warmup_attention", "indexer_warmup_attention", 10, one_percent, {}),
    "sparse loss, a key too few": ("sparse_indexer_loss", "sparse_indexer_loss", 5, without_first, {}),
    "sparse loss' scale": ("sparse_indexer_loss", "sparse_indexer_loss", 6, one_percent, {}),
}


def mislead_op(monkeypatch, function, argument, change, options):
    """An op that takes one of its arguments for another one."""
    correct = getattr(dsa, function)

    def op(*args, **kwargs):
        if any(kwargs.get(name, False) is not value for name, value in options.items()):
            return correct(*args, **kwargs)
        if isinstance(argument, int):
            return correct(*args[:argument], change(args[argument]), *args[argument + 1 :], **kwargs)
        return correct(*args, **{**kwargs, argument: change(kwargs[argument])})

    monkeypatch.setattr(dsa, function, op)


def outcomes(report):
    """op -> what the report says of it."""
    return dict(re.findall(r"^  (\w+) +(?:kernel|reference) +[\d.]+ s  (.*)$", report, re.MULTILINE))


@pytest.mark.parametrize(("name", "function", "wrong"), WRONG.values(), ids=WRONG)
def test_a_wrong_op_is_found_and_named(monkeypatch, capsys, name, function, wrong):
    break_op(monkeypatch, function, wrong)
    assert health.check() is False
    report = capsys.readouterr().out
    assert outcomes(report).keys() == SELF_TESTS.keys()
    failed = {op: outcome for op, outcome in outcomes(report).items() if outcome != "ok"}
    assert list(failed) == [name] and failed[name].startswith("FAILED: AssertionError: ")
    assert report.endswith(f"{len(SELF_TESTS) - 1} of {len(SELF_TESTS)} ops passed\n")


@pytest.mark.parametrize(("name", "function", "argument", "change", "options"), MISLED.values(), ids=MISLED)
def test_damage_is_noticed_whatever_the_numbers(monkeypatch, name, function, argument, change, options):
    """A scale off by 1%, a key off by one, a tile too few: outside of what the contract allows to a kernel."""
    mislead_op(monkeypatch, function, argument, change, options)
    for seed in range(5):
        torch.manual_seed(seed)
        with pytest.raises(AssertionError):
            SELF_TESTS[name]("cpu")


def test_sums_in_fp32_are_no_damage(monkeypatch):
    """What a sum of hundreds of products may be off by, where the result happens to be near 0."""
    rounded = {
        "sparse_indexer_loss": lambda r, a: r + 2e-6,
        "sliding_window_attention": lambda r, a: (r[0], r[1] + 5e-6),
    }
    for name, wrong in rounded.items():
        break_op(monkeypatch, name, wrong)
        for seed in (0, 1, 2, 3, 572):
            torch.manual_seed(seed)
            SELF_TESTS[name]("cpu")


def test_every_self_test_is_shown_to_fail():
    assert {name for name, _, _ in WRONG.values()} == SELF_TESTS.keys()


def test_a_failure_is_exit_code_1(monkeypatch, capsys):
    break_op(monkeypatch, "topk_indices", swapped)
    assert main(["check"]) == 1
    assert outcomes(capsys.readouterr().out)["topk_indices"].startswith("FAILED")


def test_every_seed_has_its_own_numbers(monkeypatch, capsys):
    """The third set of numbers is the one that fails, and the report says so."""
    seen, correct = [], dsa.topk_indices

    def op(scores, k):
        seen.append(scores[0, 0].item())
        return swapped(correct(scores, k), None) if len(set(seen)) == 3 else correct(scores, k)

    monkeypatch.setattr(dsa, "topk_indices", op)
    assert main(["check", "--seeds", "2"]) == 0
    seen.clear()
    assert main(["check", "--seeds", "4"]) == 1
    assert len(seen) == 3
    assert outcomes(capsys.readouterr().out)["topk_indices"].startswith("FAILED with seed 2: AssertionError")


def test_an_op_that_raises_does_not_hide_the_others(monkeypatch, capsys):
    def op(*args, **kwargs):
        raise RuntimeError("no image for this device")

    monkeypatch.setattr(dsa, "fp8_mqa_logits", op)
    assert not health.check()
    found = outcomes(capsys.readouterr().out)
    assert found.pop("fp8_mqa_logits") == "FAILED: RuntimeError: no image for this device"
    assert set(found.values()) == {"ok"}


def test_the_report(monkeypatch, capsys):
    monkeypatch.setattr(health, "_PACKAGES", ("torch", "no-such-package"))
    started = time.perf_counter()
    assert health.check() is True
    assert time.perf_counter() - started < 10
    report = capsys.readouterr().out
    assert f"torch {importlib.metadata.version('torch')}\nno-such-package not installed\n" in report
    assert "GPU: none\nbackend: reference (no GPU for this test)\ncompile cache: " in report
    assert set(outcomes(report).values()) == {"ok"}


def test_the_state_of_the_compile_cache(monkeypatch, tmp_path):
    def state(directory):
        monkeypatch.setenv("DSA_CACHE_DIR", str(directory))
        return health._cache_state()

    assert state("") == "off (DSA_CACHE_DIR is empty)"
    assert state(tmp_path / "new" / "cache") == f"{tmp_path / 'new' / 'cache'}, 0 kernels, 0.0 MB"
    assert not (tmp_path / "new").exists()
    (tmp_path / "a.o").write_bytes(bytes(1_200_000))
    (tmp_path / "b.o").write_bytes(bytes(100_000))
    (tmp_path / "b.lock").write_bytes(b"")
    assert state(tmp_path) == f"{tmp_path}, 2 kernels, 1.3 MB"
    tmp_path.chmod(0o777)
    assert re.fullmatch(
        rf"{tmp_path}, 2 kernels, 1.3 MB, not used \(.*\): every process compiles again", state(tmp_path)
    )
    tmp_path.chmod(0o700)
    too_long = tmp_path / ("x" * 300)
    assert state(too_long) == (
        f"{too_long}, 0 kernels, 0.0 MB, not used (File name too long): every process compiles again"
    )

    def exists(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:  # the home of somebody else, of whom HOME speaks
        patch.setattr(Path, "exists", exists)
        assert state("/root/.cache/dsa").endswith(", not used (Permission denied): every process compiles again")
    below_a_file = tmp_path / "a.o" / "cache"
    assert state(below_a_file) == f"{below_a_file}, 0 kernels, 0.0 MB, not writable: every process compiles again"
