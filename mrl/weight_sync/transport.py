"""draft"""

import socket
import threading
import time

import httpx
import torch.distributed as dist

from mrl.types import SyncReport


def open_transport(urls, fusions, bucket_bytes, verify, timeout_s):
    return T(urls)


class T:
    def __init__(self, urls):
        from sglang.srt.utils.common import init_custom_process_group

        self.u = urls[0]
        self.http = httpx.Client(timeout=60)
        s = socket.socket()
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        th = threading.Thread(
            target=lambda: self.post(
                "/init_weights_update_group",
                master_address="127.0.0.1",
                master_port=port,
                rank_offset=1,
                world_size=2,
                group_name="g",
                backend="gloo",
            )
        )
        th.start()
        self.g = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="g"
        )
        th.join()

    def post(self, p, **k):
        r = self.http.post(self.u + p, json=k)
        return r.json() if r.headers.get("content-type", "").startswith("application/json") else r.text

    def push(self, tensors, version):
        t = time.time()
        ts = [(n, x.contiguous()) for n, x in tensors]
        self.post("/pause_generation")
        self.post("/begin_weight_update")
        res = {}
        th = threading.Thread(
            target=lambda: res.update(
                self.post(
                    "/update_weights_from_distributed",
                    names=[n for n, _ in ts],
                    dtypes=["float32"] * len(ts),
                    shapes=[list(x.shape) for _, x in ts],
                    group_name="g",
                    flush_cache=False,
                    weight_version=str(version),
                )
            )
        )
        th.start()
        for w in [dist.broadcast(x, 0, group=self.g, async_op=True) for _, x in ts]:
            w.wait()
        th.join()
        self.post("/end_weight_update")
        assert res["success"], res
        for _ in range(50):
            if "flushed" in self.http.post(self.u + "/flush_cache").text:
                break
            time.sleep(0.02)
        self.post("/continue_generation")
        return SyncReport(sum(x.nbytes for _, x in ts), len(ts), 1, time.time() - t)

    def close(self):
        pass
