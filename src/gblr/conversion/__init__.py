"""Any model in, structured model out: conversion, cost, checkpoints."""
