"""Train a small GPT-2 with the Trainer of Hugging Face, on padded sequences."""

import argparse
import functools
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--own", action="store_true", help="with a Trainer of one's own")

MAX_STEPS, BATCH = 10, 24
torch.manual_seed(0)
devices = max(1, torch.cuda.device_count())
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
shape = {"vocab_size": 100, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
config = GPT2Config(**shape, **no_dropout, bos_token_id=0, eos_token_id=0)


def sentence():
    """Return a sample of random tokens, of random length and padded at the end to 32 tokens."""
    mask = (torch.arange(32) < torch.randint(8, 33, ())).long()
    tokens = torch.randint(1, 100, (32,)) * mask
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.7f}")


class Own(Trainer):
    """Stands for the trainers of TRL, which refuse ``nn.DataParallel``."""

    def __init__(self, model, args, **options):
        super().__init__(model, args, **options)
        assert args.n_gpu <= 1


if parser.parse_args().own:
    from balanced_dp.integrations.transformers import BalancedTrainer

    class Balanced(BalancedTrainer, Own):
        """The class that the report of ``balanced-dp run`` suggests to use."""

    Trainer = functools.partial(Balanced, gpu0_bsz=2)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=MAX_STEPS,
        per_device_train_batch_size=BATCH // devices,
        learning_rate=5e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    data = [sentence() for _ in range(BATCH * MAX_STEPS)]
    model = GPT2LMHeadModel(config)
    Trainer(model, arguments, train_dataset=data, callbacks=[PrintLoss()]).train()
