"""The model and its training step as a LightningModule.

B batch, P pixels along a side, T tokens.
"""

from __future__ import annotations

import itertools

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import DataLoader

from train import Refusal
from train.arms import Tiled, attention_function
from train.attention import set_attention
from train.batches import TIMESTEPS, Batch, CaptionedPictures
from train.models import build_models, nudge


class TextToImage(pl.LightningModule):
    """A denoiser and a text encoder, trained together to predict the noise in a picture from its caption."""

    def __init__(self, settings: DictConfig, data: CaptionedPictures) -> None:
        super().__init__()
        self.settings = settings
        self.data = data
        self.text_encoder, self.denoiser = build_models(settings, data.tokenizer)
        self.attend = attention_function(settings.attn, settings.precision.name, settings.device)
        set_attention(self.denoiser, self.attend)
        self.schedule = DDPMScheduler(TIMESTEPS, beta_schedule="squaredcos_cap_v2", prediction_type="epsilon")
        self.measured: dict[str, Tensor] = {}

    def forward(self, noisy: Tensor, timesteps: Tensor, tokens: Tensor) -> Tensor:
        """Predicted noise (B, 3, P, P) for noisy pictures, their timesteps (B,) and caption tokens (B, T)."""
        states = self.text_encoder(input_ids=tokens).last_hidden_state
        return self.denoiser(noisy, encoder_hidden_states=states, timestep=timesteps).sample

    def start_step(self, step: int) -> None:
        """Set the random state of stochastic roundings, if there are any; a twin draws its own from its fork on."""
        if isinstance(self.attend, Tiled):
            twin = self.settings.twin if step >= self.settings.twin_step else 0
            self.attend.start(self.settings.data_seed, step, twin)

    def batch(self, step: int) -> Batch:
        """Batch number `step`, on the model's device."""
        settings = self.settings
        batch = self.data.batch(settings.data_seed, step, settings.batch_size, settings.data.caption_dropout)
        return self.on_device(batch)

    def on_device(self, batch: Batch) -> Batch:
        """The batch with its tensors on the model's device."""
        return Batch(*(tensor.to(self.device) for tensor in batch))

    def predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(predicted noise, noise) of a batch, both (B, 3, P, P) in FP32 or wider."""
        wide = torch.promote_types(self.dtype, torch.float32)
        pictures, noise = batch.pictures.to(wide), batch.noise.to(wide)
        noisy = self.schedule.add_noise(pictures, noise, batch.timesteps)
        predicted = self(noisy.to(self.dtype), batch.timesteps, batch.tokens)
        return predicted.to(wide), noise

    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error of the predicted noise, in FP32 or wider."""
        return F.mse_loss(*self.predict(batch))

    def training_step(self, _, batch_idx: int) -> Tensor:
        # Keyed by the number of steps done, not by what the loader yields: Lightning replays batches on resuming.
        step = self.trainer.global_step
        self.start_step(step)
        if self.settings.twin and step == self.settings.twin_step > 0:
            nudge(self.parameters(), self.settings.twin)
        batch = self.batch(step)
        parts = [Batch(*part) for part in zip(*(tensor.chunk(self.settings.batch_split) for tensor in batch))]
        loss = sum(self.loss(part) * (len(part.indices) / len(batch.indices)) for part in parts)
        self.measured["loss"] = loss.detach()
        if not torch.isfinite(loss) and self.settings.on_nan == "stop":
            self.refuse_non_finite_loss(batch, step)
        return loss

    def refuse_non_finite_loss(self, batch: Batch, step: int) -> None:
        """Raise Refusal with the step, the first layer whose output is not finite, and the batch's captions.

        The layer is found by a second forward pass over the same batch. Neither weights nor snapshots have changed
        since the last finite step.
        """
        first: list[str] = []

        def look(name: str):
            def hook(layer, inputs, output) -> None:
                tensors = output if isinstance(output, tuple) else (output,)
                bad = any(isinstance(x, Tensor) and x.is_floating_point() and not x.isfinite().all() for x in tensors)
                if bad and not first:
                    first.append(name)

            return hook

        hooks = [layer.register_forward_hook(look(name)) for name, layer in self.named_modules() if name]
        try:
            with torch.no_grad():
                self.loss(batch)
        finally:
            for hook in hooks:
                hook.remove()
        captions = "; ".join(self.data.captions[i] for i in batch.indices.tolist())
        raise Refusal(
            f"the loss of step {step + 1} is not a finite number, first in {first[0] if first else 'the loss itself'}, "
            f"on a batch with the captions: {captions}; the snapshots so far are intact, on_nan=continue trains on"
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Counter(), batch_size=None)

    def configure_optimizers(self) -> dict:
        settings = self.settings.optimizer
        optimizer = torch.optim.AdamW(self.parameters(), settings.lr, weight_decay=settings.weight_decay)

        def warm_up(step: int) -> float:
            return min(1.0, (step + 1) / max(1, settings.warmup))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        clip = self.settings.optimizer.clip
        self.measured["grad_norm"] = torch.nn.utils.clip_grad_norm_(self.parameters(), clip)
        self.measured["lr"] = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)


class _Counter(torch.utils.data.IterableDataset):
    """0, 1, 2, ... without end: training stops by its number of steps, and the batch comes from that number."""

    def __iter__(self):
        return itertools.count()
