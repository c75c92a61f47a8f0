"""Is QLoRA on experts any good: a study at the size that a GPU answers in seven minutes.

Open README.md for what came of it, grid.py for what is run.

    corpus.py    the tokens that all models see
    run.py       starts workers, and ends them in time; run.sh is the call
    worker.py    takes jobs and runs them
    train.py     models, data, training and held-out losses
    codecs.py    experts in each codec
    errors.py    errors by expert and use
    finish.py    losses by how rarely the tokens' experts are used
    tables.py    comparisons of runs of one seed, and the page's tables
    plot.py      plots, and the page
"""
