"""Fine-tunes a causal language model of transformers with its Trainer, on packed documents, with this package's attention.

    python examples/finetune_transformers.py                  a small Llama with random weights, on the CPU in about a minute
    python examples/finetune_transformers.py --model FOLDER   a saved model, with a vocabulary of at least 257 tokens

Documents of different lengths are packed into one row, without padding; the collator's position ids separate them, and no document
attends to another. Requires: pip install transformers accelerate.
"""

from __future__ import annotations

import argparse
import os
import tempfile

# torch's OpenMP threads busy-wait for each other, which makes this several times slower if other programs use the same cores.
# OpenMP reads this variable when torch is imported. A value that is already set is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from topics import END, VOCABULARY, documents, text
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaConfig, Trainer, TrainingArguments

from flashattn_ext.integrations import transformers as fax

SMALL = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=END, pad_token_id=None, tie_word_embeddings=True,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a saved model")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)

    fax.register()
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="fax")
    else:
        model = AutoModelForCausalLM.from_config(SMALL, attn_implementation="fax")

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder, max_steps=options.steps, per_device_train_batch_size=8, learning_rate=3e-3, warmup_steps=10,
                logging_steps=20, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=[{"input_ids": tokens} for tokens in documents(longest=256) if len(tokens) > 1],
            data_collator=DataCollatorWithFlattening(),
        )  # fmt: skip
        trainer.train()

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if losses:
        print(f"loss of the first steps {losses[0]:.2f}, of the last steps {losses[-1]:.2f} nats per byte")
    start = "The statement "
    prompt = torch.tensor([list(start.encode())], device=model.device)
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=120, do_sample=False, pad_token_id=END
    )
    print(text(written[0].tolist()))


if __name__ == "__main__":
    main()
