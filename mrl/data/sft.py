"""draft"""


class SftDataset:
    @classmethod
    def load(cls, path, model, limit):
        from mrl.data.prompts import PromptDataset

        self = cls()
        d = PromptDataset.load([path], model, limit)
        self.prompts = [d.encode(i) for i in range(len(d))]
        self.responses = [
            d.tok(r["response"], add_special_tokens=False)["input_ids"] + [d.tok.eos_token_id] for r in d.rows
        ]
        return self
