"""Judge and reward model with a local HTTP server: answers, errors, timeouts and concurrency."""

import json
import re
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from http_engines import reserve_port

from mrl.config.instantiate import instantiate
from mrl.data.tokenizer import byte_tokenizer
from mrl.rewards.remote_models import Judge, RewardModel, set_servers
from mrl.rewards.reward_types import Response, Turn
from mrl.rewards.scorer import Scorer, check_reward


@contextmanager
def service(answer):
    """Start a server that answers a POST with `answer(path, body, headers) -> (status, JSON or bytes)`. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = answer(self.path, body, self.headers)
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, request, client_address):
            if not isinstance(sys.exception(), ConnectionError):  # a client that gives up closes its connection
                super().handle_error(request, client_address)

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.01))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def chat(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def scores_of(reward, *texts):
    with Scorer(reward) as scorer:
        return scorer([Response("s", t, "42", prompt=[dict(role="user", content="6 x 7?")]) for t in texts])


def test_a_judge_gets_its_template_and_its_number_is_scaled():
    seen = []

    def answer(path, body, headers):
        seen.append((path, body, headers["Authorization"]))
        return chat("It begins with Score: 2, but in the end:\nScore: 7.5")

    with service(answer) as url:
        judge = Judge(url=url + "/", model="m", template="{prompt}|{response}|{ground_truth}|{json}", max_tokens=9)
        (score,) = scores_of(judge, "{prompt} is 42")
    assert score.value == 0.75 and score.failure is None
    message = {"role": "user", "content": "6 x 7?|{prompt} is 42|42|{json}"}
    body = {"model": "m", "max_tokens": 9, "temperature": 0.0, "messages": [message]}
    assert seen == [("/v1/chat/completions", body, None)]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (chat("I would rather not say."), "the judge's answer has no match of"),
        (chat("Score: 11"), "the judge's number 11 is not in the range from 0 to 10"),
        (chat(None), "the judge's answer has no match of"),
        ((200, {"choices": []}), "IndexError"),
        ((200, b"<html>"), "JSONDecodeError"),
        ((404, {"error": "no model m"}), "answered 404: {"),
        ((401, b"who are you"), "answered 401: who are you"),
    ],
)
def test_an_answer_without_a_score_fails_without_a_retry(reply, message):
    calls = []

    def answer(path, body, headers):
        calls.append(body)
        return reply if "bad" in body["messages"][0]["content"] else chat("Score: 10")

    with service(answer) as url:
        good, bad = scores_of(Judge(url=url, model="m"), "fine", "bad")
    assert good.value == 1.0 and bad.value == 0.0
    assert message in bad.failure and len(calls) == 2


def test_a_busy_server_is_retried_up_to_the_limit():
    tries = {"twice": 0, "always": 0}

    def answer(path, body, headers):
        which = body["messages"][0]["content"]
        tries[which] += 1
        return (503, b"loading") if which == "always" or tries[which] <= 2 else chat("Score: 5")

    with service(answer) as url:
        twice, always = scores_of(Judge(url=url, model="m", template="{response}"), "twice", "always")
    assert twice.value == 0.5 and tries == {"twice": 3, "always": 3}
    assert "answered 503: loading" in always.failure


def test_a_failing_server_is_a_failure_after_the_last_attempt():
    start = time.monotonic()
    with reserve_port() as port:
        (score,) = scores_of(Judge(url=f"http://127.0.0.1:{port.getsockname()[1]}", model="m"), "x")
    assert score.value == 0 and "ConnectError" in score.failure and time.monotonic() - start < 20


@pytest.mark.extended
def test_a_server_that_does_not_answer_times_out():
    """A call without an answer in time is a failure, but the other response gets its score."""

    def answer(path, body, headers):
        time.sleep(12.0 if "slow" in body["messages"][0]["content"] else 0)
        return chat("Score: 10")

    with service(answer) as url:
        start = time.monotonic()
        fast, slow = scores_of(Judge(url=url, model="m", timeout_s=1.0, attempts=2, template="{response}"), "a", "slow")
        assert time.monotonic() - start < 10
    assert fast.value == 1.0 and "gave no answer within 1.0 s in 2 attempts" in slow.failure


def test_a_batch_has_a_deadline():
    def answer(path, body, headers):
        time.sleep(0.3)
        return chat("Score: 10")

    with service(answer) as url:
        start = time.monotonic()
        scores = scores_of(Judge(url=url, model="m", concurrency=1, deadline_s=0.8), *"abcdefghijklmnopqrst")
        assert time.monotonic() - start < 4, "one after another they take 6 s"
    assert scores[0].value == 1.0 and "not scored within 0.8 s, the limit of the whole batch" in scores[-1].failure


def test_concurrent_calls_are_bounded():
    lock, now, most = threading.Lock(), [0], [0]

    def answer(path, body, headers):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return chat("Score: 10")

    with service(answer) as url:
        scores = scores_of(Judge(url=url, model="m", concurrency=4), *["x"] * 24)
    assert all(s.value == 1.0 for s in scores) and most == [4]


def test_an_unreachable_server_is_a_failure():
    (score,) = scores_of(Judge(url="http://127.0.0.1:9", model="m", attempts=2), "x")
    assert "ConnectError" in score.failure


def test_the_key_comes_from_the_environment(monkeypatch):
    keys = []

    def answer(path, body, headers):
        keys.append(headers["Authorization"])
        return chat("Score: 10")

    with service(answer) as url:
        with pytest.raises(ValueError, match="api_key_env=JUDGE_KEY: this environment variable is not set"):
            Judge(url=url, model="m", api_key_env="JUDGE_KEY")
        monkeypatch.setenv("JUDGE_KEY", "secret\n")
        with pytest.raises(ValueError, match="the key in the environment variable JUDGE_KEY") as refusal:
            Judge(url=url, model="m", api_key_env="JUDGE_KEY")
        assert "secret" not in str(refusal.value)
        monkeypatch.setenv("JUDGE_KEY", "secret")
        judge = Judge(url=url, model="m", api_key_env="JUDGE_KEY")
        scores_of(judge, "x")
        monkeypatch.setenv("JUDGE_KEY", "secret\n")  # the process that computes rewards may have another value
        (score,) = Scorer(judge)([Response("source", "x", "1")])
    assert "JUDGE_KEY" in score.failure and "secret" not in score.failure
    assert keys == ["Bearer secret"] and "secret" not in repr(judge)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(url="localhost:1"), "url='localhost:1': expected http://HOST:PORT"),
        (dict(template="{respnse}"), "{response} is missing"),
        (dict(pattern="("), "is not a regular expression"),
        (dict(pattern="Score: 1"), "expected one group, around the number; the pattern has 0"),
        (dict(low=10.0), "low=10.0: must be below high=10.0"),
        (dict(concurrency=0), "concurrency=0: must be greater than 0"),
        (
            dict(timeout=1),
            "reward.timeout: mrl.rewards.remote_models.Judge has no argument 'timeout'; did you mean 'timeout_s'?",
        ),
    ],
)
def test_invalid_arguments_are_refused_before_any_request(arguments, message):
    node = {"_target_": "mrl.rewards.remote_models.Judge", "url": "http://h:1", "model": "m"} | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        instantiate(node, "reward")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward_model")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_reward_model_gets_the_conversation_as_token_ids(tokenizer_folder):
    seen = []

    def answer(path, body, headers):
        seen.append((path, body))
        return 200, {"embedding": [-1.5], "meta_info": {}}

    with service(answer) as url:
        reward = RewardModel(url=url, tokenizer=tokenizer_folder, scale=2.0, max_tokens=200)
        check_reward(reward)
        good, long = scores_of(reward, "42", "x" * 300)
        assert good.value == -3.0 and "max_tokens=200 is the limit" in long.failure
    tokenizer = byte_tokenizer()
    (path, body), *more = seen
    assert path == "/classify" and not more and list(body) == ["input_ids"]
    said = "<|start|>user\n6 x 7?<|end|>\n<|start|>assistant\n42<|end|>\n"
    assert tokenizer.decode(body["input_ids"]) == said
    turns = (Turn("assistant", "look"), Turn("tool", "found"), Turn("assistant", "42"))
    ids = reward.encode(Response("s", "42", "42", prompt=[dict(role="user", content="?")], turns=turns))
    assert tokenizer.decode(ids).count("<|start|>assistant\n") == 2 and "<|start|>tool\nfound" in tokenizer.decode(ids)


def test_a_model_with_several_outputs_is_no_reward_model(tokenizer_folder):
    with service(lambda *_: (200, {"embedding": [1.0, 2.0]})) as url:
        (score,) = scores_of(RewardModel(url=url, tokenizer=tokenizer_folder), "x")
        set_servers("grader", [url])
        (role_score,) = scores_of(RewardModel(role="grader", tokenizer=tokenizer_folder), "x")
    message = "returned 2 numbers; expected a model with one output"
    assert f"{url} {message}" in score.failure and f"roles.grader {message}" in role_score.failure


def test_a_reward_model_needs_its_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json is missing; give the folder of the reward model"):
        RewardModel(url="http://h:1", tokenizer=str(tmp_path))
