"""Model families: conversion of Hugging Face checkpoints to Megatron models and back. Does not import mrl."""
