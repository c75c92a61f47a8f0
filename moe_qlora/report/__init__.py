"""The page that `moe_qlora.write_report` and `moe-qlora report` write.

What goes in is anything a person can name: a checkpoint, an adapter, a Trainer's run, a live model.
What comes out is one HTML file without scripts and without links to elsewhere. Open write.py first.

    write.py      the public function: what is measured, in which order
    subject.py    what was named -> model, weights, adapter, log; what training_args.bin says of a
                  run, read without running its pickle
    measure.py    layout, bytes, a rehearsed step, quantization error, LoRA, a run's log
    routing.py    which experts a text goes to: JSONL and text files as token ids
    pieces.py     the records in between, each measured or `Missing` with the reason
    charts.py     numbers -> places and paths
    page.py       records -> HTML, with the templates beside it
"""
