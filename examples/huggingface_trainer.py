"""The Trainer of Transformers, with gradients in 4 bits between nodes: 2 replicas x 2 GPUs.

torchrun --nproc-per-node 4 examples/huggingface_trainer.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import detonation as dt
from detonation.integrations.huggingface import Replicas, Replicate


class Sequences(torch.utils.data.Dataset):
    """Token t + 1 is token t plus a step, modulo 32."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (i + (1 + i % 3) * torch.arange(32)) % 32
        return {"input_ids": tokens, "labels": tokens}


def train() -> None:
    torch.manual_seed(0)  # every rank starts from the same weights, as with from_pretrained
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, tie_word_embeddings=False, pad_token_id=None, **sizes)
    )
    arguments = TrainingArguments(
        "out/trainer",
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=4,
        save_steps=10,
        report_to="none",
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        parallelism_config=Replicas(
            dp_replicate_size=2, dp_shard_size=2
        ),  # neighbouring ranks share a replica
    )
    exchange = Replicate(dt.loco())
    trainer = Trainer(model, arguments, train_dataset=Sequences(), callbacks=[exchange])
    trainer.train()  # resume_from_checkpoint=True goes on from out/trainer, bit for bit
    trainer.save_model()

    _, equal = dt.fingerprint(trainer.model, trainer.accelerator.torch_device_mesh)
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        less = (
            20 * sum(exchange.optimizer.dense_bytes_by_level) / exchange.optimizer.stats.bytes_sent
        )
        print(
            f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {less:.1f} times fewer bytes, replicas equal: {equal}"
        )


if __name__ == "__main__":
    train()
