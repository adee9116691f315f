"""Contracts of precisions: conversion, loss scale, gradients, sessions."""
