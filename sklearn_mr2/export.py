"""Export to ONNX: a fitted classifier as one file that runs without torch and scikit-learn."""

from __future__ import annotations

import copy
import json
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from ._version import __version__
from .base import TorchClassifier

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["to_onnx"]

#: Version of ONNX's operators: the one torch translates to, which runtimes since 2023 know.
_OPSET = 18


def to_onnx(estimator: Any, X: Any) -> ModelProto:
    """Convert a fitted classifier, or a pipeline that ends in one, to ONNX.

    The graph takes a batch of any size and has two outputs, named as those of skl2onnx: ``label``
    of shape (n_samples,) is what ``predict`` returns, and ``probabilities`` of shape (n_samples,
    n_classes) is what ``predict_proba`` returns. The class labels are in the model's metadata too,
    as JSON under ``classes``.

    Parameters
    ----------
    estimator : MR2Classifier, MR2ClassifierCV, MirrorFlowClassifier or Pipeline
        Fitted, or a fitted search over one of these, of which the best is converted. Steps of a
        pipeline before the classifier are converted by skl2onnx, which has to know them.
    X : array-like or data frame of shape (n_samples, n_features), or of more dimensions
        A few rows such as ``predict`` takes, for the shape and type of the input, which is named
        ``X``. A classifier takes float32 if `X`, or its own parameter `dtype`, is that, and float64
        otherwise. A pipeline takes the type of `X`, float32 for float16; of a data frame, each
        column is an input.

    Returns
    -------
    onnx.ModelProto
        The model, which ``onnx.save(model, "model.onnx")`` writes to a file.

    Raises
    ------
    ImportError
        If onnx, onnxscript or, for a pipeline, skl2onnx is not installed.
    TypeError
        If the estimator is none of those above.
    ValueError
        If `X` is not what the estimator takes.
    onnx.checker.ValidationError
        If `X` has a column that is named ``label`` or ``probabilities``.

    Notes
    -----
    The classifier computes in the type that it was fitted in, whatever that of the input. Some
    operators of ONNX Runtime, convolutions among them, know float32 only: fit networks of those
    with ``dtype="float32"``. Steps before it compute in float32 where skl2onnx has no other way.
    The graph does not check its input as ``predict`` does; NaN in gives NaN out.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn_mr2 import MR2Classifier
    >>> from sklearn_mr2.export import to_onnx
    >>> X, y = load_iris(return_X_y=True)
    >>> model = to_onnx(MR2Classifier().fit(X, y), X[:1])
    >>> [output.name for output in model.graph.output]
    ['label', 'probabilities']
    """
    onnx = _import("onnx")
    steps, classifier = _parts(estimator)
    if not isinstance(classifier, TorchClassifier):
        raise TypeError(
            "estimator must be a classifier of sklearn_mr2, or a Pipeline whose last step is one, "
            f"got {type(classifier).__name__}. What scikit-learn alone is made of, skl2onnx "
            "converts."
        )
    if not steps:
        features, dtype = classifier._check_X(X, reset=False), classifier._floating_type(X)
        model = _network(classifier, features, np.dtype(dtype), "X")
    else:
        preprocessing = make_pipeline(*steps)
        before = _import("skl2onnx").to_onnx(preprocessing, _row(X), target_opset=_OPSET)
        (output,) = before.graph.output
        dtype = onnx.helper.tensor_dtype_to_np_dtype(output.type.tensor_type.elem_type)
        features = classifier._check_X(preprocessing.transform(X), reset=False)
        model = _network(classifier, features, dtype, "classifier_input")
        before.ir_version = model.ir_version
        model = onnx.compose.merge_models(before, model, [(output.name, "classifier_input")])
    _add_labels(model, classifier.classes_)
    model.producer_name, model.producer_version = "sklearn-mr2", __version__
    onnx.checker.check_model(model)
    return model


def _parts(estimator: Any) -> tuple[list[Any], Any]:
    """Steps of a fitted pipeline before its classifier, and that, whatever they are wrapped in."""
    check_is_fitted(estimator)
    if isinstance(estimator, Pipeline):
        steps = [step for _, step in estimator.steps[:-1] if step not in (None, "passthrough")]
        more, classifier = _parts(estimator.steps[-1][1])
        return [*steps, *more], classifier
    # MR2ClassifierCV, or a search of scikit-learn's, holds the model that it chose.
    best = getattr(estimator, "best_estimator_", None)
    return ([], estimator) if best is None else _parts(best)


class _Probabilities(nn.Module):
    """A net's module as its estimator uses it: from numbers of any type to probabilities."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, X: Tensor) -> Tensor:
        logits, _ = self.module(X.to(self.dtype))
        return logits.softmax(-1)


def _row(X: Any) -> Any:
    """The first row of `X` as skl2onnx reads types off it: of a frame of pandas or an array."""
    names = getattr(X, "column_names", getattr(X, "columns", None))
    if names is not None:
        frame = X[:1] if isinstance(X, pd.DataFrame) else {n: np.asarray(X[n][:1]) for n in names}
        return pd.DataFrame({name: _single(frame[name]) for name in names})
    row = X[:1]
    return _single(row.toarray() if hasattr(row, "toarray") else np.asarray(row))


def _single(values: Any) -> Any:
    """What is in half precision in single precision, since skl2onnx does not know the former."""
    return values.astype(np.float32) if values.dtype == np.float16 else values


def _network(
    classifier: TorchClassifier, X: NDArray, dtype: np.dtype, input_name: str
) -> ModelProto:
    """Graph of the probabilities, for inputs of the shape of `X` and of type `dtype`."""
    _import("onnxscript")
    # A copy has no compiled code, and moving it leaves the estimator where it is.
    module = copy.deepcopy(classifier.net_.module_).to("cpu")
    module = _Probabilities(module, _torch_dtype(classifier.dtype_)).eval()
    rows = torch.zeros(2, *X.shape[1:], dtype=_torch_dtype(dtype))  # one row is special to torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about torch's use of its own functions
        program = torch.onnx.export(
            module,
            (rows,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("n_samples")},),
            input_names=[input_name],
            output_names=["probabilities"],
            opset_version=_OPSET,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    # Names of torch's could be those of another graph that this one is joined to.
    return _import("onnx").compose.add_prefix(
        model, "classifier_", rename_inputs=False, rename_outputs=False
    )


def _add_labels(model: ModelProto, classes: NDArray) -> None:
    """Let the graph look up the label of the largest probability, and name the classes."""
    onnx = _import("onnx")
    if classes.dtype.kind in "US":
        classes = classes.astype(object)
    elif classes.dtype.kind in "iu":
        classes = classes.astype(np.int64)
    table, best = "classifier_classes", "classifier_best"
    labels = onnx.numpy_helper.from_array(classes, table)
    node = onnx.helper.make_node
    model.graph.initializer.append(labels)
    model.graph.node.append(node("ArgMax", ["probabilities"], [best], axis=1, keepdims=0))
    model.graph.node.append(node("Gather", [table, best], ["label"]))
    label = onnx.helper.make_tensor_value_info("label", labels.data_type, ["n_samples"])
    model.graph.output.insert(0, label)
    onnx.helper.set_model_props(model, {"classes": json.dumps(classes.tolist())})


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"to_onnx needs {name}; install it with pip install 'sklearn-mr2[export]'."
        ) from error
