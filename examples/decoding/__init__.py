"""Decoders that stop early: spelling to sound, on the CMU Pronouncing Dictionary.

    dictionary   the words, their batches, and the errors of what was found
    decoder      what a search may ask of a model
    sampling     greedy decoding; ancestral, top-k and nucleus sampling
    beam         beam search: n best, length penalty, three rules for when to stop
    risk         edit distance by a dynamic programme, and its expectation over an n-best list
    model        reads letters in both directions, and hands what it has read to a writer
    gru          a writer with a recurrent state
    transformer  a writer that attends to what it wrote, with a cache of keys and values
    training     teacher forcing, and how well searches do

Run `python -m decoding` in this directory's parent to train both writers and compare all of them.
"""
