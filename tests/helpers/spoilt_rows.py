"""A row whose features or gradients are not finite, and what a run is compared with that has it."""

from datasets import Dataset
from transformers.utils import ModelOutput

from blockdraft.trainer.draft_trainer import DraftTrainer

BAD = 3  # its `row_id`


def unsupervised(rows: Dataset) -> Dataset:
    """The rows, nothing of the bad one supervised."""
    return Dataset.from_list(
        [row | {"loss_mask": [0] * len(row["loss_mask"])} if row["row_id"] == BAD else row for row in rows]
    )


def spoil_features(trainer: DraftTrainer, value: float = float("nan")) -> None:
    """One entry of the bad row's features, as a target that overflows leaves it."""
    target_states = trainer.target_states

    def spoilt(inputs):
        features, *rest = target_states(inputs)
        features = features.clone()
        features[:, 2, 0].masked_fill_(inputs["row_id"] == BAD, value)
        return features, *rest

    trainer.target_states = spoilt


def spoil_gradients(trainer: DraftTrainer) -> None:
    """One entry of the gradient that the loss gives to the bad row, where something of it is supervised."""
    target_states, block_loss = trainer.target_states, trainer.block_loss
    ids = []

    def noting(inputs):
        ids[:] = inputs["row_id"].tolist()
        return target_states(inputs)

    def spoilt(output: ModelOutput, blocks, head_input):
        def spoil(gradient):
            gradient = gradient.clone()
            gradient[ids.index(BAD)].view(-1)[0] = float("inf")
            return gradient

        if BAD in ids and blocks.block_keep_mask[ids.index(BAD)].any():
            output.last_hidden_state.register_hook(spoil)
        return block_loss(output, blocks, head_input)

    trainer.target_states, trainer.block_loss = noting, spoilt
