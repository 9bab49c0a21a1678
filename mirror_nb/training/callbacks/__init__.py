"""What happens between the steps and epochs of `fit`: Keras's callbacks, with its names, arguments and hooks.

They run once, in the controller; in a `%%mirrored` cell on every replica, where replica 0 alone writes and shows.
They know a model by what it offers (`stop_training`, `learning_rate`, `optimizer`, `state_dict`, `save`,
`load_training`), and behave as Keras 3's documentation says, except where a docstring says otherwise.
"""

from __future__ import annotations

from mirror_nb.training.callbacks.base import Callback, CallbackList, LambdaCallback
from mirror_nb.training.callbacks.checkpoints import BackupAndRestore, ModelCheckpoint
from mirror_nb.training.callbacks.learning_rate import LearningRateScheduler, ReduceLROnPlateau
from mirror_nb.training.callbacks.records import CSVLogger, TensorBoard
from mirror_nb.training.callbacks.stopping import EarlyStopping, TerminateOnNaN

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
]
