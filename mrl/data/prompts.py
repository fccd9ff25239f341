"""draft"""

import numpy as np
import pyarrow.parquet as pq


class PromptDataset:
    @classmethod
    def load(cls, paths, model, limit):
        from transformers import AutoTokenizer

        self = cls()
        self.tok = AutoTokenizer.from_pretrained(model)
        self.rows = [r for p in paths for r in pq.read_table(p).to_pylist()]
        return self

    def __len__(self):
        return len(self.rows)

    def encode(self, i):
        return self.tok(
            self.tok.apply_chat_template(self.rows[i]["prompt"], tokenize=False, add_generation_prompt=True),
            add_special_tokens=False,
        )["input_ids"]

    def decode(self, ids):
        return self.tok.batch_decode([list(x) for x in ids], skip_special_tokens=True)

    def ground_truth(self, i):
        return self.rows[i]["reward_model"]["ground_truth"]

    def data_source(self, i):
        return self.rows[i]["data_source"]

    def extra_info(self, i):
        return self.rows[i]["extra_info"]


class PromptStream:
    def __init__(self, num_rows, batch_size, seed, shuffle):
        self.n, self.b, self.rng, self.order = num_rows, batch_size, np.random.default_rng(seed), []

    def __next__(self):
        while len(self.order) < self.b:
            self.order = list(self.order) + self.rng.permutation(self.n).tolist()
        out, self.order = self.order[: self.b], self.order[self.b :]
        return np.array(out)
