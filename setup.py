"""The package and its dependency ranges, stated here only.

`requirements.txt` (any machine, no GPU needed) and `requirements-gpu.txt` (clusters) are locks that `make lock`
resolves from these ranges; a test fails when a lock leaves them.
"""

from pathlib import Path

from setuptools import find_packages, setup

DEPENDENCIES = [
    # The engines and the model: these move together, sglang pins torch and transformers exactly.
    "torch>=2.14,<2.15",
    "megatron-core>=0.19.2,<0.20",
    "sglang>=0.5.23,<0.6",
    "transformers>=5.19,<6",
    "tokenizers>=0.23",
    "safetensors>=0.8",
    # The controller.
    "ray[default]>=2.60,<3",
    "hydra-core>=1.3.8,<1.4",
    "omegaconf>=2.3.1,<2.4",
    "httpx>=0.28,<1",
    "aiohttp>=3.14,<4",  # thousands of requests at one time, as agents have them
    "orjson>=3.13,<4",
    "xxhash>=4",  # checksums
    "zstandard>=0.25",  # differences of weights on their way to engines
    # What a run needs to go on.
    "msgspec>=0.21",  # samples in the rollout log
    "filelock>=4",  # one process at a time in a run's folder
    "fsspec>=2026.2",  # copies of checkpoints, wherever a store is
    "psutil>=7",  # Megatron-Core imports it without declaring it
    # Data.
    "numpy>=2.3,<2.4",  # mistral-common, which sglang needs beside its CUDA kernels, stops there
    "pyarrow>=26",
    "datasets>=5.2",  # folders that its save_to_disk wrote
    "jinja2>=3.1",  # errors of chat templates
    # Rewards and evaluation.
    "math-verify[antlr4_9_3]>=0.9",  # the version of antlr4 that hydra-core needs
    "pebble>=5.2",  # pools of processes whose tasks have deadlines
    "tenacity>=9.2",  # retries with limits
    "scipy>=1.18",  # confidence intervals
    # What a run shows.
    "matplotlib>=3.11,<4",
    "rich>=15",
    "wandb>=0.31,<1",
]

EXTRAS = {
    "gpu": ["transformer-engine[pytorch]>=2.20,<3"],
    "optuna": ["optuna>=5,<6"],  # hydra/sweeper=optuna
    "dev": [
        "cosmic-ray>=8.7",  # mutations of the algorithms, which unit tests must notice
        "import-linter>=2.5",
        "linkchecker>=10.6",
        "mkdocs-material>=9.8,<10",
        "mkdocstrings[python]>=1.0.8",
        "packaging>=26",
        "pre-commit>=4",
        "pyrefly>=1.4,<2",
        "hypothesis>=6.140",
        "pytest>=9,<10",
        "pytest-timeout>=2.4",
        "pytest-xdist>=3.8",
        "ruff>=0.15",
    ],
}

setup(
    name="mrl",
    version="0.1.0",
    description="Reinforcement learning of language models with Megatron-Core, SGLang and Ray",
    long_description=(Path(__file__).parent / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="reinforcement-learning rlhf grpo ppo llm megatron sglang ray",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.12,<3.13",
    # {"": "."} makes an editable install a plain .pth entry, under which a folder named `models/` in the working
    # directory does not win over ours; `include` keeps tests, conf and outputs out of a wheel.
    package_dir={"": "."},
    packages=find_packages(".", include=["mrl*", "parallel*", "models*"]),
    package_data={package: ["py.typed"] for package in ("mrl", "models", "parallel")},
    install_requires=DEPENDENCIES,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["mrl = mrl.cli:main"],
        "sglang.srt.platforms": ["mrl_cpu = mrl.rollout.cpu.sglang_platform:activate"],
    },
)
