"""The engine's end of a sync, inside each of SGLang's scheduler processes: SGLang calls `load` as a custom weight loader.

The engine is started with `custom_weight_loader=[WEIGHT_LOADER]` (mrl/weight_sync/engine_control.py); a request to
/update_weights_from_tensor with `load_format=WEIGHT_LOADER` then brings a message here on every tensor-parallel rank. Nothing is raised
into SGLang, where it would end the server: what happened is said on the control channel, as a receipt. One sync session at a
time; a new one replaces the last.
"""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.conversion.hf_reader import HFWeights
from mrl.weight_sync.control_channel import ControlChannel
from mrl.weight_sync.sender import BucketHeader, ack, checksum, dead, decode, views
from mrl.weight_sync.transfer_plan import Bucket, Destination, TensorChunk
from mrl.weight_sync.transports import ProcessGroupEnd, RecvEnd, SharedSlotsRecvEnd, join_group

# FROM: Whether an engine stores weights where the family's table says, in any backend's form: what it loaded by itself, before any

logger = logging.getLogger(__name__)
MAX_NAMES = 8  # tensors named in a receipt


@dataclass
class ReceiverSession:
    """What this rank keeps between the calls of one sync session."""

    channel: ControlChannel
    engine_rank: int  # counted over all engines
    buckets: Sequence[tuple[Bucket, list[Destination]]] = ()
    inlet: RecvEnd | None = None
    holds: str | None = None  # the push whose weights are in the model, checked
    headers: dict[str, BucketHeader] = field(default_factory=dict)


_session: ReceiverSession | None = None
_pushed = False  # whether anything was ever written into the model


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Do what the message says; SGLang passes a list of (name, tensor), of which the first name is the message."""
    message = json.loads(named_tensors[0][0])
    try:
        with torch.no_grad():
            _HANDLERS[message["do"]](model, message)
    except Exception as error:  # a process boundary: the sender is told, the engine stays out of service
        logger.exception("weight sync: %s failed", message["do"])
        _report_failure(message, error)


def _hello(model: torch.nn.Module, message: dict[str, Any]) -> None:
    """Begin a session: say what this rank holds."""
    from sglang.srt.runtime_context import get_parallel  # this runs in SGLang

    global _session
    last, _session = _session, None
    if last is not None and last.inlet is not None:
        last.inlet.close()
    tp_rank = get_parallel().tp_rank
    channel = ControlChannel.join(message["address"], message["port"], message["session"], message["timeout_s"])
    _session = ReceiverSession(channel, message["engine"] * message["tp"] + tp_rank)
    parameters = {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in _parameters(model).items()}
    device = next(model.parameters()).device
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    said = dict(where=(socket.gethostname(), gpu), parameters=parameters)
    channel.put(f"hello/{_session.engine_rank}", said)


def _plan(model: torch.nn.Module, message: dict[str, Any]) -> None:
    """Take this rank's part of the plan; prove that its places are right while the model is as it was loaded."""
    from sglang.srt.runtime_context import get_model  # this runs in SGLang

    session = _current()
    session.buckets = session.channel.get(f"plan/{session.engine_rank}")
    folder, as_loaded = Path(get_model().model_path), get_model().load_format in ("auto", "safetensors") and not _pushed
    wrong = misplaced(folder, _parameters(model), session.buckets) if as_loaded and folder.is_dir() else []
    if wrong:
        raise ValueError(
            f"{len(wrong)} parameters are not what the files in {folder} say, e.g. {wrong[0]}: this engine stores weights in a "
            "form of its own; use weight_sync.transport=disk."
        )
    session.channel.put(f"plan/{session.engine_rank}/taken", None)


def _open(model: torch.nn.Module, message: dict[str, Any]) -> None:
    """Reach the senders."""
    session = _current()
    how = session.channel.get("wires")
    if how["backend"] is None:
        session.inlet = SharedSlotsRecvEnd({b.sender: how["handles"][b.sender] for b, _ in session.buckets})
    else:
        senders, size = how["num_senders"], how["num_senders"] + how["num_receivers"]
        group = join_group(
            session.channel.store, how["name"], how["backend"], senders + session.engine_rank, size, how["timeout_s"]
        )
        device = next(model.parameters()).device
        largest = max((bucket.nbytes for bucket, _ in session.buckets), default=0)
        session.inlet = ProcessGroupEnd(group, senders, largest, device, slots=1)
    session.channel.put(f"open/{session.engine_rank}", None)


def _load(model: torch.nn.Module, message: dict[str, Any]) -> None:
    """Take every bucket of a push, then hash what the model holds now and compare."""
    from sglang.srt.model_loader.loader import post_load_weights  # this runs in SGLang

    session, push = _current(), message["push"]
    assert session.inlet is not None, "weights before the session was opened"
    global _pushed
    _pushed = True
    session.holds, base, parameters = None, session.holds, _parameters(model)
    failed = dead(push, session.engine_rank)
    for bucket, places in session.buckets:
        header: BucketHeader = session.channel.get(f"{push}/bucket/{bucket.key}", [failed])
        data = session.inlet.take(bucket.sender, bucket.number, header.nbytes)
        if header.encoding == "delta":
            if base != message["base"]:
                raise ValueError(f"a difference from {message['base']} came to an engine that holds {base}.")
            _add(parameters, bucket, places, decode(data, bucket))
        else:
            for place, piece in zip(places, views(data, bucket), strict=True):
                _at(parameters, place).copy_(piece.view(place.box.sizes))
        if data.is_cuda:
            torch.cuda.current_stream().synchronize()  # copied, before the slot is used again
        session.channel.put(ack(push, bucket, session.engine_rank), None)
        session.headers[bucket.key] = header
    post_load_weights(model)  # what some models derive from their weights
    wrong = _wrong_pieces(session, parameters)
    session.holds = None if wrong else push
    session.channel.put(f"{push}/receipt/{session.engine_rank}", dict(wrong=wrong))


def _wrong_pieces(session: ReceiverSession, parameters: dict[str, Tensor]) -> list[str]:
    """Pieces of which the model holds other bytes than the senders hashed; the first few by name, then their number."""
    wrong = []
    for bucket, places in session.buckets:
        checksums = session.headers[bucket.key].checksums
        for piece, place, expected in zip(bucket.pieces, places, checksums, strict=True):
            if checksum(_at(parameters, place)) != expected:
                wrong.append(f"{piece} in {place.param}")
    return wrong[:MAX_NAMES] + ([f"and {len(wrong) - MAX_NAMES} more"] if len(wrong) > MAX_NAMES else [])


def _add(parameters: dict[str, Tensor], bucket: Bucket, places: list[Destination], difference: Tensor) -> None:
    """XOR a decoded difference onto the model."""
    for place, piece in zip(places, views(difference, bucket), strict=True):
        live = _at(parameters, place)
        change = piece.view(place.box.sizes).to(live.device)
        same_size = getattr(torch, f"int{8 * live.itemsize}")
        live.copy_((live.contiguous().view(same_size) ^ change.view(same_size)).view(live.dtype))


def _parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def _at(parameters: dict[str, Tensor], place: Destination) -> Tensor:
    return parameters[place.param][place.box.slices]


def _current() -> ReceiverSession:
    assert _session is not None, "a message before a session was begun"
    return _session


def _report_failure(message: dict[str, Any], error: Exception) -> None:
    if _session is None:
        return  # nobody to tell; the sender's wait ends at its deadline
    with suppress(Exception):  # a store that is gone; its host notices by itself
        key = dead(message.get("push", "open"), _session.engine_rank)
        _session.channel.put(key, f"{type(error).__name__}: {error}")


_HANDLERS = {"hello": _hello, "plan": _plan, "open": _open, "load": _load}


_NUMBER = re.compile(r"\d+")


def misplaced(
    folder: Path, parameters: Mapping[str, Tensor], buckets: Sequence[tuple[Bucket, Sequence[Destination]]]
) -> list[str]:
    """Pieces that differ between the engine and the Hugging Face folder it was started on; of each kind of tensor the first
    piece and the last are looked at, whatever their layer and expert."""
    ends: dict[str, list[tuple[TensorChunk, Destination]]] = {}
    for bucket, places in buckets:
        for piece, place in zip(bucket.pieces, places, strict=True):
            found = ends.setdefault(_NUMBER.sub("#", f"{piece.name} {place.param}"), [])
            found[1:] = [(piece, place)]
    weights = HFWeights(folder)
    return [
        f"{piece} in {place.param}"
        for found in ends.values()
        for piece, place in found
        if piece.name in weights and not _same(weights, piece, parameters[place.param][place.box.slices])
    ]


def _same(weights: HFWeights, piece: TensorChunk, live: Tensor) -> bool:
    file = weights.read(piece.name, piece.box.starts, piece.box.sizes)
    return torch.equal(file.to(live.dtype).to(live.device).view(live.shape), live)
