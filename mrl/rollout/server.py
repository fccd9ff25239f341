"""draft"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx


def check_server_args(d):
    pass


def default_server_args(dtype, context_length):
    return dict(
        device="cpu",
        attention_backend="mrl_batched_sdpa",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        dtype=dtype,
        max_total_tokens=65536,
        grammar_backend="none",
        disable_cuda_graph=True,
        context_length=context_length,
        skip_server_warmup=True,
        host="127.0.0.1",
        log_level="error",
        weight_version="0",
    )


class EngineServer:
    def __init__(self, args, log):
        s = socket.socket()
        s.bind(("127.0.0.1", 0))
        self.port = s.getsockname()[1]
        s.close()
        self.args = dict(args, port=self.port)
        self.log = log
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        f = str(self.log) + ".json"
        open(f, "w").write(json.dumps(self.args))
        self.p = subprocess.Popen(
            [sys.executable, "-m", "mrl.rollout.serve", f],
            stdout=open(self.log, "w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_ready(self, timeout_s):
        end = time.time() + timeout_s
        while time.time() < end:
            assert self.p.poll() is None, open(self.log).read()[-2000:]
            try:
                if httpx.get(self.url + "/health", timeout=2).status_code == 200:
                    return
            except Exception:
                pass
            time.sleep(0.2)
        raise TimeoutError

    def cpu_seconds(self):
        return 0.0

    def stop(self):
        os.killpg(self.p.pid, signal.SIGKILL)
