"""SGLang engines and the workers that sample from them."""
