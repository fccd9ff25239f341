"""Receiver: receives weights on an engine rank, inside SGLang's scheduler process.

SGLang calls `handle_message` as a custom weight loader. The engine is started with `custom_weight_loader=[WEIGHT_LOADER]`;
WEIGHT_LOADER is the import path of `handle_message` (mrl/weight_sync/engine_control.py). A request to
/update_weights_from_tensor with `load_format=WEIGHT_LOADER` then delivers a message to every tensor-parallel rank.

No exception leaves this module, because an exception would end the SGLang server. Failures and results are reported on the
control channel. There is one session at a time; a new session replaces the last one.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.conversion.fp8_blocks import FP8_DTYPE
from models.conversion.hf_reader import HFWeights
from models.conversion.mtp_mapping import DRAFT_PREFIX
from mrl.weight_sync.control_channel import (
    NO_PUSH,
    TRANSPORT_KEY,
    ControlChannel,
    EngineAction,
    ack_key,
    connected_key,
    failure_key,
    header_key,
    plan_checked_key,
    rank_info_key,
    receipt_key,
    receiver_plan_key,
)
from mrl.weight_sync.engine_layout import KV_CACHE_SCALE_SUFFIXES
from mrl.weight_sync.sender import BucketHeader, checksums, chunk_views, decode_delta
from mrl.weight_sync.transfer_plan import Bucket, Destination, ProcessLocation, TensorChunk
from mrl.weight_sync.transports import (
    ProcessGroupEndpoint,
    ProcessGroupSetup,
    RecvEndpoint,
    SharedBuffersRecvEndpoint,
    SharedBuffersSetup,
    location_of,
)
from parallel import spans

logger = logging.getLogger(__name__)
MAX_NAMES = 8  # an error message lists at most this many wrong chunks
_INDEX_IN_NAME = re.compile(r"\d+")  # index of a layer or expert in the name of a tensor


@dataclass(frozen=True)
class EngineRankInfo:
    """What an engine rank reports about itself when a session begins."""

    location: ProcessLocation
    parameters: dict[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype without the prefix "torch.")


@dataclass
class ReceiverSession:
    """State of this engine rank between the messages of one session."""

    channel: ControlChannel
    engine_rank: int  # numbered over all engines
    # The buckets in order of arrival, each with the destinations of its chunks
    buckets: Sequence[tuple[Bucket, list[Destination]]] = ()
    recv_endpoint: RecvEndpoint | None = None
    # Name of the push whose weights the model holds, if checksums have verified them. None: they are not verified
    verified_push: str | None = None
    headers: dict[str, BucketHeader] = field(default_factory=dict)  # headers of the current push, by Bucket.key


_session: ReceiverSession | None = None
_weights_were_pushed = False  # whether any push has ever written to the model
_draft: torch.nn.Module | None = None  # draft model of speculative decoding, if the session sends its weights


def handle_message(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Handle a message from the coordinator. SGLang passes (name, tensor) pairs; the first name is the message, as JSON."""
    message = json.loads(named_tensors[0][0])
    try:
        with torch.no_grad():
            _HANDLERS[EngineAction(message["action"])](model, message)
    except Exception as error:  # process boundary: the failure is reported, and the engine stays out of service
        logger.exception("weight sync: %s failed", message["action"])
        _report_failure(message, error)


def _register_draft(model: torch.nn.Module, message: dict[str, Any]) -> None:
    """Keep the draft model for the session that begins next. For this message, SGLang passes it as `model`."""
    global _draft
    _draft = model


def _begin_session(model: torch.nn.Module, message: dict[str, Any]) -> None:
    """Close the last session, begin a new one, and report the location and the parameters of this rank."""
    from sglang.srt.runtime_context import get_parallel  # can be imported only inside SGLang

    global _session, _draft
    last, _session = _session, None
    _draft = _draft if message["with_draft"] else None
    if last is not None and last.recv_endpoint is not None:
        last.recv_endpoint.close()
    channel = ControlChannel.join(message["address"], message["port"], message["session"], message["timeout_s"])
    _session = ReceiverSession(channel, message["engine"] * message["tp"] + get_parallel().tp_rank)
    info = EngineRankInfo(
        location_of(next(model.parameters()).device),
        {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in _parameters(model).items()},
    )
    channel.put(rank_info_key(_session.engine_rank), info)
    spans.start_from_environment(get_parallel().tp_rank)


def _check_plan(model: torch.nn.Module, message: dict[str, Any]) -> None:
    """Read this rank's part of the plan, and check that its destinations hold the values of the folder that SGLang loaded.

    The check is skipped if SGLang did not load the weights from a folder, or if a push has changed the weights.
    """
    from sglang.srt.runtime_context import get_model  # can be imported only inside SGLang

    session = _current_session()
    session.buckets = session.channel.get(receiver_plan_key(session.engine_rank))
    folder, load_format = Path(get_model().model_path), get_model().load_format
    unchanged = load_format in ("auto", "safetensors") and not _weights_were_pushed
    misplaced = misplaced_chunks(folder, _parameters(model), session.buckets) if unchanged and folder.is_dir() else []
    if misplaced:
        raise ValueError(
            f"{len(misplaced)} parts of parameters differ from the files in {folder}, e.g. {misplaced[0]}: this engine stores "
            "weights in a different form; use weight_sync.transport=disk."
        )
    session.channel.put(plan_checked_key(session.engine_rank), None)


def misplaced_chunks(
    folder: Path, parameters: Mapping[str, Tensor], buckets: Sequence[tuple[Bucket, Sequence[Destination]]]
) -> list[str]:
    """Return the chunks whose destination holds other values than the Hugging Face folder `folder`.

    The engine was started with this folder. A difference therefore shows that the engine stores a weight elsewhere than the
    family's table says. Names and shapes alone would not show this: a gate projection and an up projection have the same shape.

    Only the first and the last chunk of each kind of tensor are compared. Tensors are of one kind if their names differ only
    in the indices of layer and expert. Chunks in FP8 are not compared.
    """
    first_and_last: dict[str, list[tuple[TensorChunk, Destination]]] = {}
    for bucket, destinations in buckets:
        for chunk, destination in zip(bucket.chunks, destinations, strict=True):
            first_last = first_and_last.setdefault(_INDEX_IN_NAME.sub("#", f"{chunk.name} {destination.param}"), [])
            first_last[1:] = [(chunk, destination)]
    weights = HFWeights(folder)
    return [
        f"{chunk} in {destination.param}"
        for first_last in first_and_last.values()
        for chunk, destination in first_last
        if chunk.name in weights
        and chunk.dtype != FP8_DTYPE
        and not _equals_file(weights, chunk, _view(parameters, destination))
    ]


def _equals_file(weights: HFWeights, chunk: TensorChunk, in_model: Tensor) -> bool:
    stored = weights.read(chunk.name, chunk.box.starts, chunk.box.sizes)
    return torch.equal(stored.to(in_model.dtype).to(in_model.device).view(in_model.shape), in_model)


def _connect(model: torch.nn.Module, message: dict[str, Any]) -> None:
    """Connect to the senders."""
    session = _current_session()
    setup: SharedBuffersSetup | ProcessGroupSetup = session.channel.get(TRANSPORT_KEY)
    if isinstance(setup, SharedBuffersSetup):
        session.recv_endpoint = SharedBuffersRecvEndpoint(
            {b.sender: setup.handles[b.sender] for b, _ in session.buckets}
        )
    else:
        # One transfer buffer suffices, because this rank copies a bucket before it receives the next one.
        buffer_bytes = max((bucket.nbytes for bucket, _ in session.buckets), default=0)
        engine, tp_rank = divmod(session.engine_rank, setup.engine_tp)
        rank, device = setup.num_senders + tp_rank, next(model.parameters()).device
        session.recv_endpoint = ProcessGroupEndpoint(
            session.channel.store, setup, rank, [engine], buffer_bytes, device, num_buffers=1
        )
    session.channel.put(connected_key(session.engine_rank), None)


def _load(model: torch.nn.Module, message: dict[str, Any]) -> None:
    """Receive every bucket of a push. Then compare the checksums of the model's weights with the checksums from the senders."""
    from sglang.srt.model_loader.loader import post_load_weights  # can be imported only inside SGLang

    session, push_name = _current_session(), message["push"]
    assert session.recv_endpoint is not None, "weights arrive before this rank has connected to the senders"
    global _weights_were_pushed
    _weights_were_pushed = True
    session.verified_push, base_push, parameters = None, session.verified_push, _parameters(model)
    failure = failure_key(push_name, session.engine_rank)
    for bucket, destinations in session.buckets:
        with spans.span("wait for a sender", "weight_sync", bucket=bucket.index):
            header: BucketHeader = session.channel.get(header_key(push_name, bucket.key), [failure])
        with spans.span("receive bucket", "weight_sync", bucket=bucket.index, bytes=header.nbytes):
            data = session.recv_endpoint.receive(bucket.sender, bucket.index, header.nbytes)
            if header.encoding == "delta":
                if base_push != message["base"]:
                    raise ValueError(
                        f"the engine received the difference from {message['base']}, but it holds the weights of {base_push}."
                    )
                _apply_delta(parameters, bucket, destinations, decode_delta(data, bucket))
            else:
                for destination, chunk in zip(destinations, chunk_views(data, bucket), strict=True):
                    _view(parameters, destination).copy_(chunk.view(destination.box.sizes))
            if data.is_cuda:
                torch.cuda.current_stream().synchronize()  # after the acknowledgement, the sender may overwrite `data`
        session.channel.put(ack_key(push_name, bucket.key, session.engine_rank), None)
        session.headers[bucket.key] = header
    for name, parameter in parameters.items():
        if name.endswith(KV_CACHE_SCALE_SUFFIXES):
            parameter.fill_(1.0)  # an offload discards this constant
    for each in (model, *([_draft] if _draft is not None else ())):
        post_load_weights(each)  # some models compute further tensors from their weights
    with spans.span("verify weights", "weight_sync"):
        wrong = _wrong_chunks(session, parameters)
    spans.begin_step(message["version"] + 1)  # the engine now samples for the step after this weight version
    session.verified_push = None if wrong else push_name
    session.channel.put(receipt_key(push_name, session.engine_rank), wrong)


def _wrong_chunks(session: ReceiverSession, parameters: dict[str, Tensor]) -> list[str]:
    """Return the chunks whose checksum in the model differs from the sender's checksum.

    If there are more than MAX_NAMES such chunks, the last element is "and N more".
    """
    wrong = []
    for bucket, destinations in session.buckets:
        found = checksums([_view(parameters, destination) for destination in destinations])
        expected = session.headers[bucket.key].checksums
        for chunk, destination, mine, sent in zip(bucket.chunks, destinations, found, expected, strict=True):
            if mine != sent:
                wrong.append(f"{chunk} in {destination.param}")
    return wrong[:MAX_NAMES] + ([f"and {len(wrong) - MAX_NAMES} more"] if len(wrong) > MAX_NAMES else [])


def _apply_delta(parameters: dict[str, Tensor], bucket: Bucket, destinations: list[Destination], delta: Tensor) -> None:
    """XOR a decoded difference onto the model's weights."""
    for destination, chunk in zip(destinations, chunk_views(delta, bucket), strict=True):
        in_model = _view(parameters, destination)
        change = chunk.view(destination.box.sizes).to(in_model.device)
        as_int = getattr(torch, f"int{8 * in_model.itemsize}")
        in_model.copy_((in_model.contiguous().view(as_int) ^ change.view(as_int)).view(in_model.dtype))


def _parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters of the model, and the parameters that only the draft model has, by name.

    The names of the draft model's parameters get the prefix DRAFT_PREFIX. The draft model shares the embedding and the output
    layer of the model, so these two are returned only once.
    """
    own = {name: parameter.data for name, parameter in model.named_parameters()}
    shared = {parameter.data_ptr() for parameter in own.values()}
    drafts = _draft.named_parameters() if _draft is not None else ()
    return own | {DRAFT_PREFIX + name: p.data for name, p in drafts if p.data_ptr() not in shared}


def _view(parameters: Mapping[str, Tensor], destination: Destination) -> Tensor:
    return parameters[destination.param][destination.box.slices]


def _current_session() -> ReceiverSession:
    assert _session is not None, "a message arrived before a session was begun"
    return _session


def _report_failure(message: dict[str, Any], error: Exception) -> None:
    if _session is None:
        return  # there is no channel to report on; the coordinator's wait ends at its deadline
    with suppress(Exception):  # if this fails, the store is lost; the coordinator's wait ends at its deadline
        key = failure_key(message.get("push", NO_PUSH), _session.engine_rank)
        _session.channel.put(key, f"{type(error).__name__}: {error}")


_HANDLERS: dict[EngineAction, Callable[[torch.nn.Module, dict[str, Any]], None]] = {
    EngineAction.REGISTER_DRAFT: _register_draft,
    EngineAction.BEGIN_SESSION: _begin_session,
    EngineAction.CHECK_PLAN: _check_plan,
    EngineAction.CONNECT: _connect,
    EngineAction.LOAD: _load,
}
