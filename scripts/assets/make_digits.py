"""Makes razorctl/data/digits/{train,test}.parquet from scikit-learn's copy of the UCI digits.

.venv/bin/pip install scikit-learn && .venv/bin/python scripts/assets/make_digits.py
"""

from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image
from sklearn.datasets import load_digits

OUT = Path(__file__).parents[2] / "razorctl" / "data" / "digits"


def main() -> None:
    digits = load_digits()
    # Sixteen ink levels, 0 to 16, spread over a byte.
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(names=[str(i) for i in range(10)])})
    test = np.arange(len(images)) % 5 == 0
    OUT.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", ~test), ("test", test)):
        columns = {"image": list(images[rows]), "label": digits.target[rows].tolist()}
        Dataset.from_dict(columns, features).to_parquet(OUT / f"{name}.parquet")


if __name__ == "__main__":
    main()
